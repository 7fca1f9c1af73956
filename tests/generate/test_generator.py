"""The adapter writes what transformers' own `generate` writes, and stops where it stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from toy_bank import save_switching_bank
from toy_heads import random_heads
from transformers import (
    GenerationConfig,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from entmtp_calib.bank import Bank
from entmtp_calib.errors import DataError, HeadsError, UsageError
from entmtp_calib.generate.generator import EntmtpGenerator, GenerateOutput
from entmtp_calib.heads.model import Heads

PROMPT = torch.tensor([[1, 2, 3, 4]])
Make = Callable[..., EntmtpGenerator]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank.load(save_switching_bank(tmp_path_factory.mktemp("bank") / "bank.safetensors"))


@pytest.fixture(scope="module")
def heads() -> Heads:
    return random_heads(toys.rand(), n_heads=4)


@pytest.fixture(scope="module")
def make(bank: Bank, heads: Heads) -> Make:
    """A generator on RAND, by default with a policy that switches trees all the time."""
    return lambda policy="ladder": EntmtpGenerator(toys.rand(), heads, bank, policy)


def letters() -> PreTrainedTokenizerFast:
    """Token 0 is a, token 9 is j."""
    letter = {chr(ord("a") + token): token for token in range(toys.RAND_VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=letter, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def theirs(prompt: Tensor = PROMPT, **options: Any) -> Tensor:
    """What transformers writes with the same weights."""
    mask = options.pop("attention_mask", torch.ones_like(prompt))
    return toys.rand().model.generate(prompt, attention_mask=mask, pad_token_id=0, **options)


class After(StoppingCriteria):
    """Ends a text with its n-th token, and remembers what it was shown."""

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


class Recording(BaseStreamer):
    """Keeps what a streamer is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.given.append((list(value.shape), value.tolist()))

    def end(self) -> None:
        self.given.append("end")


@pytest.mark.parametrize("policy", ["auto", "none", "ladder", "hysteresis", "staged"])
def test_greedy_text_is_transformers(make: Make, policy: str) -> None:
    found = make(policy).generate(PROMPT, max_new_tokens=60)
    assert found.dtype == torch.long
    assert torch.equal(found, theirs(max_new_tokens=60))


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 17},
        {"generation_config": GenerationConfig(max_new_tokens=9)},
        {"generation_config": GenerationConfig(max_new_tokens=9), "max_new_tokens": 5},
        {"max_new_tokens": 40, "do_sample": False, "num_beams": 1, "use_cache": True},
        {"max_new_tokens": 40, "eos_token_id": 7},
        {"max_new_tokens": 40, "eos_token_id": [8, 9]},
        {"max_new_tokens": 40, "eos_token_id": None},
        {"max_new_tokens": 40, "stop_strings": ["gh", "cc"], "tokenizer": letters()},
        {"max_new_tokens": 40, "max_time": 0.0},
        {"max_new_tokens": 12, "attention_mask": torch.tensor([[0, 0, 1, 1]])},
    ],
    ids=lambda options: " ".join(options) or "nothing",
)
def test_settings_mean_what_they_mean_to_transformers(make: Make, options: dict[str, Any]) -> None:
    assert torch.equal(make().generate(PROMPT, **options), theirs(**options))


@pytest.mark.parametrize("length", range(5, 16))
def test_a_text_ends_with_the_token_that_a_criterion_ends_it_at(make: Make, length: int) -> None:
    ours, plain = After(length), After(length)
    found = make().generate(PROMPT, max_new_tokens=40, stopping_criteria=[ours])
    expected = theirs(max_new_tokens=40, stopping_criteria=[plain])
    assert found.tolist() == expected.tolist()
    assert ours.seen == plain.seen


def test_transformers_own_criteria_work(make: Make) -> None:
    strings = StopStringCriteria(letters(), ["g"])
    found = make().generate(PROMPT, max_new_tokens=40, stopping_criteria=[strings])
    assert found.tolist() == theirs(max_new_tokens=40, stopping_criteria=[strings]).tolist()
    assert found[0, -1] == 6
    at_once = make().generate(PROMPT, stopping_criteria=[MaxTimeCriteria(max_time=-1.0)])
    assert at_once.shape == (1, 5)


def test_a_streamer_gets_what_transformers_gives_it(make: Make) -> None:
    ours, plain = Recording(), Recording()
    make().generate(PROMPT, max_new_tokens=9, streamer=ours, stopping_criteria=[After(11)])
    theirs(max_new_tokens=9, streamer=plain, stopping_criteria=[After(11)])
    assert ours.given == plain.given
    assert len(ours.given) == 1 + 7 + 1


def test_text_streamers_show_the_same_text(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = toys.word_tokenizer(10)
    make().generate(PROMPT, max_new_tokens=9, streamer=TextStreamer(tokenizer))
    shown = capsys.readouterr().out
    expected = theirs(max_new_tokens=9, streamer=TextStreamer(tokenizer))
    assert shown == capsys.readouterr().out
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True)
    make().generate(PROMPT, max_new_tokens=9, streamer=pieces)
    assert "".join(pieces) == tokenizer.decode(expected[0, 4:])


@pytest.mark.parametrize("policy", ["ladder", "staged"])
def test_sampled_text_is_that_of_plain_decoding_with_the_same_seed(make: Make, policy: str) -> None:
    options = {"max_new_tokens": 50, "do_sample": True, "temperature": 0.8, "top_p": 0.9}
    texts = [make(name).generate(PROMPT, seed=5, **options) for name in (policy, "none")]
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], make(policy).generate(PROMPT, seed=6, **options))


def test_torchs_seed_fixes_the_draws(make: Make) -> None:
    texts = []
    for seed in (3, 3, None):
        if seed is not None:
            torch.manual_seed(seed)
        texts.append(make().generate(PROMPT, max_new_tokens=40, do_sample=True).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_an_object_holds_the_steps(make: Make) -> None:
    output = make().generate(
        PROMPT, max_new_tokens=30, return_dict_in_generate=True, stopping_criteria=[After(21)]
    )
    assert isinstance(output, GenerateOutput)
    generation = output.generation
    assert output.sequences.shape == (1, 21)
    assert output.sequences[0, 4:].tolist() == generation.tokens
    assert sum(step.emitted_tokens for step in generation.steps) == 17
    assert all(s.emitted_tokens == s.accepted_draft_tokens + 1 for s in generation.steps)
    assert len(set(generation.chosen)) > 1, "the ladder switches"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_new_tokens": 5}, "length"),
        ({"max_new_tokens": 500}, "positions"),
        ({"max_new_tokens": 40, "eos_token_id": list(range(10))}, "stop"),
        ({"max_new_tokens": 40, "stopping_criteria": [After(9)]}, "criterion"),
    ],
)
def test_the_object_says_why_the_text_ends(
    make: Make, options: dict[str, Any], reason: str
) -> None:
    output = make().generate(PROMPT, return_dict_in_generate=True, **options)
    assert output.generation.reason == reason
    assert output.sequences.shape[1] <= toys.rand().max_positions


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (torch.ones(2, 3, dtype=torch.long), r"\[2, 3\]"),
        (torch.ones(3, dtype=torch.long), r"\[3\]"),
        ([[1, 2]], "list"),
        (torch.ones(1, 0, dtype=torch.long), "0 tokens"),
    ],
)
def test_a_prompt_is_one_text(make: Make, ids: Any, found: str) -> None:
    with pytest.raises(DataError, match=found):
        make().generate(ids)


@pytest.mark.parametrize("mask", [[[1, 1, 1, 0]], [[1, 0, 1, 1]], [[1, 1]], [[1] * 4] * 2])
def test_only_padding_on_the_left_is_taken_away(make: Make, mask: list[list[int]]) -> None:
    with pytest.raises(DataError, match="attention_mask"):
        make().generate(PROMPT, attention_mask=torch.tensor(mask))


def test_a_bank_of_other_sizes_or_an_unknown_policy_is_refused(
    bank: Bank, make: Make, heads: Heads
) -> None:
    with pytest.raises(HeadsError):
        EntmtpGenerator(toys.cycle(), heads, bank)
    with pytest.raises(UsageError, match="nonsense"):
        make("nonsense")

"""Many texts at once: each is what decoding writes for its prompt alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toys
from torch import Tensor

from entmtp_calib.config import SamplingConfig
from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import DataError
from entmtp_calib.policy import Static
from entmtp_calib.sampling import certainty
from entmtp_calib.targets import texts
from entmtp_calib.targets.batch import BatchCache
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.packed import can_pack
from entmtp_calib.targets.texts import PlainText, plain_texts
from entmtp_calib.tree import EMPTY

ENGINES = ["transformers", *(["lean"] if can_pack() else [])]
PROMPTS = [(3, 1, 4), (1, 5, 9, 2, 6, 5, 3), (5,), (3, 5, 8, 9), (2, 7), (1, 8, 2, 8, 1), (4, 5, 9)]
SAMPLED = SamplingConfig(0.9, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.save_rand(tmp_path_factory.mktemp("rand"), config_eos=7)


@pytest.fixture(scope="module", params=ENGINES)
def target(request: pytest.FixtureRequest, folder: Path) -> Target:
    return load_target(folder, engine=request.param)


@pytest.fixture(scope="module")
def fast(folder: Path) -> Target:
    """For what does not depend on the engine."""
    return load_target(folder, engine=ENGINES[-1])


def alone(
    target: Target, sampling: SamplingConfig, limit: int, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[list[int]]:
    decoder = Decoder(target, None, [EMPTY], sampling)
    return [decoder.generate(ids, Static(0), limit).tokens for ids in prompts]


def together(
    target: Target,
    sampling: SamplingConfig | None = None,
    limit: int = 40,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[list[int]]:
    found = {t.prompt: t.tokens for t in plain_texts(target, prompts, limit, sampling)}
    return [found[number] for number in range(len(prompts))]


@pytest.mark.parametrize("places", [1, 3, 32])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
def test_each_text_is_what_its_prompt_alone_leads_to(
    target: Target, sampling: SamplingConfig, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "MOST_SEQUENCES", places)
    expected = alone(target, sampling, 24)
    assert together(target, sampling, 24) == expected
    assert len({len(tokens) for tokens in expected}) > 2, "texts should end at different times"


def test_a_text_may_end_with_its_first_token(fast: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MOST_SEQUENCES", 2)
    first = [tokens[0] for tokens in alone(fast, SAMPLED, 1)]
    for eos in sorted(set(first))[:3]:
        facts = replace(fast.facts, eos_ids=frozenset({eos}))
        target = Target(fast._engine, fast.tokenizer, facts)
        found = together(target, SAMPLED, 6)
        assert found == alone(target, SAMPLED, 6)
        assert [len(tokens) == 1 for tokens in found] == [token == eos for token in first]


def test_a_text_ends_at_the_models_last_position(target: Target) -> None:
    long = [3, 5] * 62
    expected = alone(target, SAMPLED, 40, [long, [3]])
    assert len(expected[0]) == 4
    assert together(target, SAMPLED, 40, [long, [3]]) == expected


def test_a_record_is_what_one_pass_after_the_other_would_see(target: Target) -> None:
    found = list(plain_texts(target, PROMPTS, 24, SAMPLED, record=True))
    assert sorted(text.prompt for text in found) == list(range(len(PROMPTS)))
    for text in found:
        assert text.rows is not None
        hidden = one_by_one(target, [*PROMPTS[text.prompt], *text.tokens[:-1]])
        logits = [target.logits(row[None])[0] for row in hidden[-len(text.tokens) :]]
        expected = torch.stack([torch.stack(certainty(row)) for row in logits])
        if target.engine == "lean":
            assert torch.equal(text.rows.hidden, hidden)
            assert torch.equal(text.rows.certainty, expected)
        else:
            torch.testing.assert_close(text.rows.hidden, hidden, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(text.rows.certainty, expected, rtol=1e-4, atol=1e-4)


def one_by_one(target: Target, ids: Sequence[int]) -> Tensor:
    """Hidden states of a text, a row per pass."""
    cache, rows = target.new_cache(len(ids)), []
    for position, token in enumerate(ids):
        rows.append(target.forward([token], [position], cache))
        cache.commit([0])
    return torch.cat(rows)


def test_every_token_is_counted_when_it_is_there(fast: Target) -> None:
    counts: list[int] = []
    found = list(plain_texts(fast, PROMPTS, 10, on_tokens=counts.append))
    assert sum(counts) == sum(len(text.tokens) for text in found)


def test_no_prompts_are_no_texts(fast: Target) -> None:
    assert list(plain_texts(fast, [], 10)) == []


@pytest.mark.parametrize("ids", [(), (1,) * 128])
def test_a_prompt_that_cannot_be_continued_is_one_line(fast: Target, ids: Sequence[int]) -> None:
    with pytest.raises(DataError, match=f"a prompt of {len(ids)} tokens"):
        list(plain_texts(fast, [(1, 2), ids], 10))


class Sizes:
    """Notes the caches that are made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[BatchCache] = []
        monkeypatch.setattr(texts, "BatchCache", self._make)

    def _make(self, *sizes: int) -> BatchCache:
        self.made.append(BatchCache(*sizes))
        return self.made[-1]


def test_keys_and_values_stay_within_the_budget(
    fast: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts have few places; short ones then have a cache of their own, with more."""
    budget = 3 * 64 * fast.row_bytes
    monkeypatch.setattr(texts, "CPU_BYTES", budget)
    sizes = Sizes(monkeypatch)
    prompts = [[3, 5] * 45, [2, 7] * 44, *PROMPTS]
    assert together(fast, SAMPLED, 9, prompts) == alone(fast, SAMPLED, 9, prompts)
    assert [cache.n_bytes for cache in sizes.made] == [budget * 2 // 3, budget]
    assert [cache.capacity for cache in sizes.made] == [98, 15]


def test_one_sequence_is_written_even_where_it_is_above_the_budget(
    fast: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "CPU_BYTES", 1)
    sizes = Sizes(monkeypatch)
    assert together(fast, limit=8) == alone(fast, SamplingConfig(), 8)
    assert {cache.n_bytes for cache in sizes.made} == {64 * fast.row_bytes}


def test_an_accelerator_lends_half_of_what_it_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6_000, 10_000))
    assert texts._bytes(torch.device("cuda", 1)) == 3_000
    assert texts._bytes(torch.device("cpu")) == texts.CPU_BYTES


def test_short_and_long_prompts_share_a_cache_with_a_place_for_each(
    fast: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(monkeypatch)
    list(plain_texts(fast, [[3] * 100, [2]], 5))
    assert len(sizes.made) == 1


def test_a_text_gives_its_place_to_the_next_prompt(
    fast: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the batch is full until no prompt waits."""
    monkeypatch.setattr(texts, "MOST_SEQUENCES", 3)
    widths: Counter[int] = Counter()
    forward = Target.forward_batch

    def counted(self: Target, ids: list[int], positions: list[int], cache: BatchCache) -> Tensor:
        widths[len(ids)] += 1
        return forward(self, ids, positions, cache)

    monkeypatch.setattr(Target, "forward_batch", counted)
    found: list[PlainText] = []
    for text in plain_texts(fast, PROMPTS, 40, SAMPLED):
        found.append(text)
        if len(found) <= len(PROMPTS) - 3:
            assert set(widths) <= {3}
    assert widths.keys() == {1, 2, 3}

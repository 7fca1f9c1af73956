"""The lean engine: the same model as transformers', and the same bits whatever rides along."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from entmtp_calib.targets.batch import BatchCache
from entmtp_calib.targets.cache import TreeCache
from entmtp_calib.targets.hf import TransformersEngine
from entmtp_calib.targets.lean import LeanEngine, is_worthwhile, why_not_lean
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Engine, Target
from entmtp_calib.targets.network import load_network
from entmtp_calib.targets.packed import PackedLinear, can_pack, fits_half, stable_rows
from entmtp_calib.targets.selfcheck import self_check

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")

WIDE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 600,
    "initializer_range": 0.2,
}


def seeded(kind: type[Any], config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config).eval().requires_grad_(False)


@pytest.fixture(scope="module", params=[1, 2, 6], ids="{} kv heads".format)
def wide(request: pytest.FixtureRequest) -> LeanEngine:
    """Of 6 heads; with as many kv heads there is one query a group, the hardest case for bits."""
    config = LlamaConfig(**WIDE | {"num_key_value_heads": request.param})
    return LeanEngine(seeded(LlamaForCausalLM, config))


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(300, (420,), generator=torch.Generator().manual_seed(1))


def prefilled(engine: Engine, ids: Tensor, capacity: int) -> TreeCache:
    cache = TreeCache(engine.n_layers, capacity)
    engine.hidden(ids, torch.arange(len(ids)), cache, None)
    cache.commit(range(len(ids)))
    return cache


@torch.no_grad()
def rounded_to_half(model: Any) -> Any:
    """The model with its linear weights rounded to float16 values, as packing rounds them."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(module.weight.half())
    return model


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**WIDE)),
        (LlamaForCausalLM, LlamaConfig(**WIDE, rope_parameters=LLAMA3)),
        (LlamaForCausalLM, LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True)),
        (Qwen2ForCausalLM, Qwen2Config(**WIDE)),
        (Qwen3ForCausalLM, Qwen3Config(**WIDE, head_dim=48)),
    ],
    ids=["llama", "llama3-rope", "llama-biases", "qwen2", "qwen3"],
)
def test_it_computes_the_model_with_weights_rounded_to_float16(
    kind: type[Any], config: Any, text: Tensor
) -> None:
    model = seeded(kind, config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(2))
        if "norm" in name:
            torch.nn.init.normal_(weight, mean=1, generator=torch.Generator().manual_seed(3))
    lean = LeanEngine(model)
    self_check(lean, model)
    cache = prefilled(lean, text[:150], 300)
    found = lean.logits(lean.hidden(text[150:300], torch.arange(150, 300), cache, None))
    expected = rounded_to_half(model)(input_ids=text[None, :300]).logits[0, 150:]
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("context", [1, 7, 126, 150, 192, 255, 300])
def test_a_row_has_the_same_bits_alone_and_among_others(
    wide: LeanEngine, text: Tensor, context: int
) -> None:
    cache = prefilled(wide, text[:context], context + 70)
    alone = []
    for position in range(context, context + 8):
        alone.append(
            wide.hidden(text[position : position + 1], torch.tensor([position]), cache, None)
        )
        cache.commit([0])
    expected = torch.cat(alone)
    assert torch.equal(wide.logits(expected[:1]), wide.logits(expected)[:1])
    cache.length = context
    for n in (2, 7, 8, 16, 32, 64):
        rows = torch.arange(context, context + n)
        found = wide.hidden(text[rows], rows, cache, None)
        assert torch.equal(found[:8], expected[: min(n, 8)])


@pytest.mark.parametrize("context", [5, 100, 124, 190, 250])
@pytest.mark.parametrize("width", [2, 7])
def test_a_path_through_a_tree_has_the_bits_of_plain_decoding(
    wide: LeanEngine, text: Tensor, context: int, width: int
) -> None:
    """The tree: a chain of 8 true tokens, each followed by siblings that are wrong."""
    depth, chain = 8, torch.arange(8) * width
    ids = torch.randint(300, (depth * width,), generator=torch.Generator().manual_seed(3))
    ids[chain] = text[context : context + depth]
    levels = torch.arange(depth * width) // width
    mask = torch.eye(depth * width, dtype=torch.bool)
    for row in range(depth * width):
        mask[row, chain[: levels[row]]] = True
    cache = prefilled(wide, text[:context], context + 70)
    in_tree = wide.hidden(ids, context + levels, cache, mask)[chain]
    plain = []
    for position in range(context, context + depth):
        plain.append(
            wide.hidden(text[position : position + 1], torch.tensor([position]), cache, None)
        )
        cache.commit([0])
    assert torch.equal(in_tree, torch.cat(plain))


def test_a_long_prompt_has_the_bits_of_its_tokens(wide: LeanEngine, text: Tensor) -> None:
    at_once = wide.hidden(text, torch.arange(420), TreeCache(wide.n_layers, 420), None)
    cache = prefilled(wide, text[:419], 420)
    assert torch.equal(wide.hidden(text[419:], torch.tensor([419]), cache, None), at_once[419:])


def greedy(target: Target, prompt: list[int], n_tokens: int) -> list[int]:
    cache, ids = target.new_cache(128), list(prompt)
    hidden = target.forward(prompt, range(len(prompt)), cache)
    cache.commit(range(len(prompt)))
    for _ in range(n_tokens):
        ids.append(int(target.logits(hidden[-1:]).argmax()))
        hidden = target.forward(ids[-1:], [cache.length], cache)
        cache.commit([0])
    return ids


def test_greedy_text_on_rand_is_that_of_transformers(tmp_path: Path) -> None:
    lean = load_target(toys.save_rand(tmp_path), engine="lean")
    assert (lean.engine, lean.facts.attention, lean.model) == ("lean", "lean", None)
    assert greedy(lean, [3, 1, 4], 60) == greedy(toys.rand(), [3, 1, 4], 60)
    assert lean.fingerprint == toys.rand().fingerprint
    assert torch.equal(lean.lm_head_weight, toys.rand().lm_head_weight)
    assert torch.equal(lean.embedding_weight, toys.rand().embedding_weight)


def test_a_full_cache_is_refused_before_anything_is_written(wide: LeanEngine, text: Tensor) -> None:
    cache = prefilled(wide, text[:5], 6)
    with pytest.raises(ValueError, match="2 rows in a cache with room for 1"):
        wide.hidden(text[:2], torch.tensor([5, 6]), cache, None)


@pytest.mark.parametrize("lengths", [[1], [5, 6], [127, 128, 130], [3, 260, 40, 7, 255, 1]])
def test_a_row_has_the_same_bits_beside_other_texts(
    wide: LeanEngine, text: Tensor, lengths: list[int]
) -> None:
    batch = BatchCache(wide.n_layers, 300, len(lengths))
    alone = []
    for number, length in enumerate(lengths):
        cache = batch.of(number)
        wide.hidden(text[:length], torch.arange(length), cache, None)
        cache.commit(range(length))
        alone.append(wide.hidden(text[length : length + 1], torch.tensor([length]), cache, None))
    together = wide.hidden_batch(text[lengths], torch.tensor(lengths), batch)
    assert torch.equal(together, torch.cat(alone))


def test_models_it_does_not_know_are_told_apart() -> None:
    model = toys.rand().model
    assert why_not_lean(model) is None
    assert not is_worthwhile(model)
    assert "knows LlamaForCausalLM" in str(why_not_lean(gpt2()))
    assert "torch.bfloat16" in str(why_not_lean(seeded(LlamaForCausalLM, small()).bfloat16()))
    assert "activation gelu" in str(
        why_not_lean(seeded(LlamaForCausalLM, small(hidden_act="gelu")))
    )
    huge = seeded(LlamaForCausalLM, small())
    huge.lm_head.weight[0, 0] = 1e5
    assert "too large" in str(why_not_lean(huge))


def small(**options: Any) -> LlamaConfig:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=None, **options)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return seeded(GPT2LMHeadModel, GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2))


def test_it_lets_go_of_the_weights_that_it_packed(tmp_path: Path) -> None:
    network = load_network(toys.save_rand(tmp_path), torch.float32, None)
    kept = LeanEngine(network)
    weight = weakref.ref(network.model.layers[0].mlp.up_proj.weight)
    del network
    assert weight() is None
    assert kept.logits(kept.lm_head_weight[:1]).shape == (1, 10)


def test_packed_rows_do_not_depend_on_their_company() -> None:
    generator = torch.Generator().manual_seed(4)
    linear = PackedLinear(torch.randn(96, 200, generator=generator))
    x = torch.randn(180, 200, generator=generator)
    whole = linear(x)
    for n in (*range(1, 70), 127, 150, 165):
        rows = stable_rows(n)
        assert n <= rows <= n + 12
        assert torch.equal(linear(x[:rows])[:n], whole[:n])


def test_a_packed_layer_adds_its_bias() -> None:
    linear = PackedLinear(torch.eye(4), torch.arange(4.0))
    assert linear(torch.ones(2, 4)).tolist() == [[1, 2, 3, 4]] * 2


def test_only_weights_that_float16_can_hold_are_packed() -> None:
    assert fits_half(torch.tensor([65504.0, -65504.0]))
    assert not fits_half(torch.tensor([70000.0]))
    assert not fits_half(torch.tensor([float("nan")]))


def test_transformers_serves_what_lean_does_not() -> None:
    assert isinstance(toys.rand()._engine, TransformersEngine)

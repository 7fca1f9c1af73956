"""The speed benchmark's own arithmetic, its GGUF file, and how it sorts operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peers
import pytest
import steps
import torch
import toys
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import ModelError
from entmtp_calib.policy import Static
from entmtp_calib.progress import Silent
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.network import load_network
from entmtp_calib.tree import EMPTY

PROMPT = [1, 2, 3, 4]
ENDS = {"bos_token_id": None, "eos_token_id": None}


def as_in_the_file(weight: torch.Tensor) -> torch.Tensor:
    return weight.half().float() if weight.dim() > 1 else weight


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_the_gguf_file_back_as_it_was(tmp_path: Path, tied: bool) -> None:
    network = load_network(
        toys.save_rand(tmp_path / "model", tie_word_embeddings=tied), torch.float32, None
    )
    peers.write_gguf(network, tmp_path / "model.gguf")
    again = dict(load_network(tmp_path / "model.gguf", torch.float32, None).named_parameters())
    weights = dict(network.named_parameters())
    assert again.keys() - {"lm_head.weight"} == weights.keys() - {"lm_head.weight"}
    for name, weight in weights.items():
        assert torch.equal(again[name], as_in_the_file(weight)), name


def test_a_family_that_rotates_as_transformers_does_keeps_its_rows(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    network = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).requires_grad_(False)
    torch.nn.init.normal_(network.model.layers[0].self_attn.q_proj.bias)
    peers.write_gguf(network, tmp_path / "model.gguf")
    found = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    projection = network.model.layers[0].self_attn.q_proj
    assert np.array_equal(found["blk.0.attn_q.weight"], projection.weight.half().numpy())
    assert np.array_equal(found["blk.0.attn_q.bias"], projection.bias.numpy())


def test_pairs_that_rotate_together_become_neighbors() -> None:
    rows = torch.arange(8)[:, None]
    assert peers.paired(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_gguf_file_is_written_once(tmp_path: Path) -> None:
    target = toys.rand()
    path = peers.cached_gguf(target, lambda: target.model, tmp_path / "new")
    assert peers.cached_gguf(target, lambda: pytest.fail("again"), tmp_path / "new") == path


def test_a_gguf_file_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)
    with pytest.raises(OSError, match="no space"):
        peers.write_gguf(toys.rand().model, tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    network = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2, **ENDS))
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        peers.write_gguf(network, tmp_path / "model.gguf")


@pytest.mark.skipif(not peers.installed(), reason="needs xllamacpp")
def test_llama_cpp_writes_plain_decodings_text(tmp_path: Path) -> None:
    target = toys.rand()
    peer = peers.LlamaCpp(
        lambda: peers.cached_gguf(target, lambda: target.model, tmp_path), context=64, threads=1
    )
    plain = Decoder(target, None, [EMPTY]).generate(PROMPT, Static(0), 20)
    assert peer.generate(PROMPT, 20).tokens == plain.tokens


def test_the_work_of_a_pass_is_counted_from_the_shapes() -> None:
    attention, mlp, output = (32 + 16 + 16 + 32) * 32, 3 * 64 * 32, 10 * 32
    work = steps.work_of(toys.rand())
    assert work == steps.Work(
        weights=2 * (attention + mlp) + output,
        weight_bytes=4,
        cache_bytes=2 * 2 * 16 * 4,
        query_width=2 * 32,
    )
    assert work.n_bytes(context=100) == 4 * work.weights + 101 * work.cache_bytes
    assert work.flops(context=0) == 2 * work.weights + 4 * work.query_width
    assert work.flops(context=7, rows=3) == 3 * work.flops(context=7)


def test_tied_weights_are_still_multiplied_with(tmp_path: Path) -> None:
    tied = load_target(toys.save_rand(tmp_path, tie_word_embeddings=True))
    assert steps.work_of(tied) == steps.work_of(toys.rand())


def test_the_floor_is_the_longer_of_reading_and_multiplying() -> None:
    work = steps.Work(weights=1000, weight_bytes=2, cache_bytes=0, query_width=0)
    slow_memory = steps.Rates(bytes_per_second=1e3, flops_per_second=1e9)
    assert work.floor_ms(slow_memory, context=9, rows=5) == pytest.approx(2000.0)
    slow_processor = steps.Rates(bytes_per_second=1e9, flops_per_second=1e3)
    assert work.floor_ms(slow_processor, context=9, rows=5) == pytest.approx(10_000.0)


def test_rates_are_medians_of_the_fastest_reading() -> None:
    measured = steps.Passes(
        reads={"slow": [4.0, 4.0, 4.0], "fast": [1.0, 2.0, 9.0]},
        multiplications=[1.0, 2.0, 9.0],
        steps=[1.0],
        rows={1: [1.0, 2.0, 4.0], 8: [2.0, 5.0, 4.0]},
    )
    assert measured.rates.bytes_per_second == steps.READ_BYTES / 2
    assert measured.rates.flops_per_second == steps.SIDE**3
    assert measured.ratio(8).value == 2.0


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("aten::fbgemm_linear_fp16_weight_fp32_activation", [3, 64], steps.MATRIX),
        ("quantized::linear_dynamic_fp16", [3, 64], steps.MATRIX),
        ("aten::addmm", [64], steps.MATRIX),
        ("aten::bmm", [3, 9, 64], steps.ATTENTION),
        ("aten::exp_", [3, 9, 100], steps.ATTENTION),
        ("aten::scaled_dot_product_attention", [1, 3, 9, 64], steps.ATTENTION),
        ("aten::exp", [5, 100], steps.OTHER),  # of sampling
        ("aten::sum", [64], steps.OTHER),
        ("aten::mul_", [3, 9, 64], steps.OTHER),  # rotary embeddings
        ("aten::copy_", [3, 9, 64], steps.OTHER),
    ],
)
def test_operations_are_sorted_by_name_and_dimensions(
    name: str, shape: list[int], kind: str
) -> None:
    assert steps.kind(name, [shape]) == kind


def test_the_shares_of_a_step_add_up_and_know_every_pass() -> None:
    decoder = Decoder(toys.rand(), None, [EMPTY])
    methods = {"plain": (decoder, Static(0))}
    shares = steps.measure_shares(methods, [PROMPT], 4, 0, Silent())["plain"]
    kinds = (steps.MATRIX, steps.ATTENTION, steps.OTHER)
    assert sum(shares.share(each) for each in kinds) == pytest.approx(1.0)
    assert all(shares.seconds[each] > 0 for each in kinds)
    assert shares.passes == 3
    assert "between operations" in shares.others


def test_a_method_is_compared_by_its_time_behind_the_first_token() -> None:
    def run(method: str, prompt: str, seconds: float, same: bool) -> dict[str, Any]:
        numbers = {"decode_seconds": seconds, "tokens": 5, "passes": 4}
        return {"method": method, "prompt": prompt, "same": same, **numbers}

    runs = [run("plain", "a", 0.4, True), run("plain", "b", 0.8, True)]
    runs += [run(peers.LLAMA, "a", 0.2, False), run(peers.LLAMA, "b", 0.4, False)]
    plain = {(1,): [5, 6, 7, 8, 9], (2,): [5, 6, 7, 8, 0]}
    texts = {"plain": plain, peers.LLAMA: {(1,): [5, 6, 1, 1, 1], (2,): [5, 6, 7, 8, 3]}}
    row = peers.method_row("plain", True, runs, texts, frozenset({0}))
    assert row["ms_per_token"].value == pytest.approx(150.0)
    assert row["x_llama_cpp"].value == pytest.approx(2.0)
    assert row["x_transformers"] is None
    assert row["texts_as_plain"] == 2
    peer = peers.method_row(peers.LLAMA, False, runs, texts, frozenset({0}))
    assert (peer["texts_as_plain"], peer["tokens_in_common"], peer["tokens_of_plain"]) == (1, 6, 9)

"""The pieces of a packed decoder layer, and the layers as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from entmtp_calib.targets.attention import AttentionShape, Rotary, rows_pass
from entmtp_calib.targets.layer import Layer, Layers, RMSNorm, Stack, compiled, fused, paired
from entmtp_calib.targets.packed import PackedLinear, can_pack, stable_rows

needs_packing = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")

SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=16)
FREQUENCIES = 1000.0 ** -(torch.arange(0, 16, 2) / 16)
ROTARY = Rotary(SHAPE, FREQUENCIES, 1.0, 0.25)
NORM = RMSNorm(torch.ones(48), 1e-5)


def test_the_norm_is_torchs_and_its_rows_do_not_meet() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(90, 576, generator=generator), torch.randn(576, generator=generator)
    found = RMSNorm(weight, 1e-5)(x)
    assert torch.allclose(found, torch.rms_norm(x, (576,), weight, 1e-5), atol=1e-6)
    for n in (1, 2, 5, 60):
        assert torch.equal(RMSNorm(weight, 1e-5)(x[:n]), found[:n])


def test_rows_that_rotate_together_become_neighbors() -> None:
    weight, bias = paired((torch.arange(16.0)[:, None], torch.arange(16.0)), head_dim=8)
    assert weight[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert bias is not None
    assert torch.equal(bias, weight[:, 0])


def random_layer(seed: int) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    return Layer(
        shape=SHAPE,
        attention_norm=RMSNorm(torch.ones(48), 1e-5),
        query_key_value=fused([(weight(96, 48), None), (weight(64, 48), None)]),
        output=PackedLinear(weight(48, 96)),
        mlp_norm=RMSNorm(torch.ones(48), 1e-5),
        gate_up=fused([(weight(80, 48), None), (weight(80, 48), None)]),
        down=PackedLinear(weight(48, 80)),
    )


def run(layers: Any, n: int, n_layers: int = 1) -> Tensor:
    store = torch.zeros(n_layers, 2, 448, 2 * 16)
    positions = list(range(n))
    step, views = rows_pass(SHAPE, ROTARY(positions), positions, 0, None, store)
    x = torch.randn(300, 48, generator=torch.Generator().manual_seed(9))[: stable_rows(n)]
    return layers(x.clone(), step, views)[:n]


@needs_packing
def test_attention_is_softmax_over_rotated_grouped_keys() -> None:
    layer, n = random_layer(1), stable_rows(5)
    store = torch.zeros(1, 2, 64, 2 * 16)
    positions = torch.arange(n)
    at = positions.tolist()
    step, views = rows_pass(SHAPE, ROTARY(at), at, 0, None, store)
    rows = torch.randn(n, 10 * 16, generator=torch.Generator().manual_seed(1))
    sums = [values[0] for values in views.sums]
    found = layer.attend(rows.clone(), step, views.flat[0], views.keys[0], sums)
    pairs = torch.view_as_complex(rows[:, : 8 * 16].reshape(n, 8, 8, 2))
    turns = torch.polar(torch.ones(n, 8), positions[:, None] * FREQUENCIES)
    heads = torch.view_as_real(pairs * turns[:, None]).flatten(2)
    keys, values = heads[:, 6:], rows[:, 8 * 16 :].view(n, 2, 16)
    for head in range(6):
        scores = heads[:, head] @ keys[:, head // 3].T * 0.25
        weights = scores.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)
        expected = weights @ values[:, head // 3]
        assert torch.allclose(found[:, 16 * head : 16 * head + 16], expected, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("n", [1, 4, 130, 300])
def test_compiled_layers_have_the_bits_of_the_modules_they_are_made_of(n: int) -> None:
    layers = [random_layer(2), random_layer(3)]
    assert torch.equal(run(compiled(layers, NORM), n, 2), run(Layers(layers, NORM), n, 2))


@needs_packing
def test_layers_that_torch_cannot_compile_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise NotImplementedError

    layers = [random_layer(4)]
    expected = run(compiled(layers, NORM), 3)
    monkeypatch.setattr(torch.jit, "script", refuse)
    assert isinstance(compiled(layers, NORM), Layers)
    assert torch.equal(run(compiled(layers, NORM), 3), expected)


@needs_packing
def test_what_comes_out_is_a_tensor_like_any_other() -> None:
    stack = Stack(SHAPE, ROTARY, [random_layer(5)], NORM)
    store, one = torch.zeros(1, 2, 64, 2 * 16), torch.zeros(1, 1, 2, 64, 2 * 16)
    rows = stack.rows(torch.ones(3, 48), torch.arange(3), 0, None, store)
    row = stack.texts(torch.ones(1, 48), torch.zeros(1, dtype=torch.long), one)
    for out in (rows, row):
        out.add_(1)  # an inference tensor could not be changed here, nor trained on
        torch.nn.Linear(48, 1)(out).sum().backward()

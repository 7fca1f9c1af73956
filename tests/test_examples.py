"""The examples run, on toys; what they show is what the library gives."""

from __future__ import annotations

import pytest
import torch
import toys
from toy_bank import write_prompts
from toy_heads import perfect_cycle_heads, save_for

import entmtp_calib
from entmtp_calib.targets.load import load_target
from examples import decode, generate

SIZES = {
    "task": "custom",
    "search_prompts": 2,
    "select_prompts": 2,
    "report_prompts": 2,
    "max_new_tokens": 8,
    "max_nodes": 3,
    "max_candidates": 1,
    "step_repetitions": 3,
    "context_lengths": (8,),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> entmtp_calib.Inputs:
    """CYCLE, heads that are always right, and prompts."""
    folder = tmp_path_factory.mktemp("examples")
    model = toys.save_cycle(folder / "model")
    target = load_target(model)
    heads = save_for(perfect_cycle_heads(target), target, folder / "heads")
    data = write_prompts(folder / "prompts.jsonl", [f"t{n}" for n in range(64)], 6)
    return entmtp_calib.Inputs(str(model), str(heads), str(data))


@pytest.fixture(scope="module")
def run(inputs: entmtp_calib.Inputs) -> str:
    return decode.build(inputs, **SIZES)


@pytest.fixture(autouse=True, scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run folders are made under the working folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        yield


def test_a_bank_is_built_and_decoded_with(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = decode.decode(run, "t5 t6")
    assert text.split() == [f"t{(7 + n) % 64}" for n in range(64)]
    assert "tokens per step, end: length" in capsys.readouterr().out


def test_generate_gives_and_shows_transformers_text(
    inputs: entmtp_calib.Inputs, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = generate.generate(inputs.model, inputs.heads, run, "t5 t6")
    assert torch.equal(ids, torch.arange(5, 5 + 66)[None] % 64)
    assert capsys.readouterr().out.split() == [f"t{n % 64}" for n in range(5, 5 + 66)]

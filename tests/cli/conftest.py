"""Toys that several commands are tried on; building a bank takes seconds, so it is done once."""

from __future__ import annotations

import pytest
import toys
from toy_bank import (
    SMALL,
    Built,
    Switching,
    run,
    save_hostile,
    save_switching_bank,
    write_prompts,
)
from toy_heads import perfect_cycle_heads, save_for

from entmtp_calib.targets.load import load_target


@pytest.fixture(scope="session")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Arguments that name CYCLE, its perfect heads and prompts for it."""
    folder = tmp_path_factory.mktemp("cycle")
    model = toys.save_cycle(folder / "model")
    target = load_target(model)
    heads = save_for(perfect_cycle_heads(target), target, folder / "heads")
    data = write_prompts(folder / "[id].jsonl", [f"t{n}" for n in range(64)], 9)
    return ["--model", model, "--heads", heads, "--data", data]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, cycle: list[object]) -> Built:
    folder = tmp_path_factory.mktemp("built")
    arguments = [*SMALL, *cycle]
    document = folder / "bank.json"
    result = run("build-bank", *arguments, "--out", folder / "run", "--json", document)
    assert result.exit_code == 0, result.output
    return Built(folder / "run", arguments, result.stdout, document)


@pytest.fixture(scope="session")
def switching(tmp_path_factory: pytest.TempPathFactory) -> Switching:
    folder = tmp_path_factory.mktemp("switching")
    model, heads = save_hostile(folder)
    words = "List[int] a[1:] d[key] [/b] [red] :smile:".split()
    data = write_prompts(folder / "prompts.jsonl", words, 5)
    return Switching(save_switching_bank(folder / "bank.safetensors"), model, heads, data)

"""The README's path from published heads to the files of engines, each command as it stands there.

The hub is a stand-in: small repositories in the files of the published ones, under their names.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import Result
from published_heads import (
    HYDRA_CONFIG,
    HYDRA_PT,
    VICUNA_VOCAB,
    hydra_state,
    save_heads_file,
    save_vicuna,
)
from toy_bank import BUSHY, SMALL, run

from entmtp_calib.bank import Bank
from entmtp_calib.formats.chains import SglangNumbers
from entmtp_calib.formats.reading import read
from entmtp_calib.heads.native import read_description

README = Path(__file__).parents[2] / "README.md"
SECTION = re.compile(r"^## From published heads to your engine\n.*?```sh\n(.*?)```", re.M | re.S)
TASK = SMALL.index("--task")
SIZES = SMALL[:TASK] + SMALL[TASK + 2 :]
QUESTIONS = 9


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a newcomer with a network."""
    repos = {
        "lmsys/vicuna-7b-v1.3": save_vicuna(tmp_path / "models--lmsys--vicuna-7b-v1.3"),
        "ankner/hydra-vicuna-7b-v1.3": save_heads_file(
            tmp_path / "hydra", HYDRA_PT, hydra_state(v=VICUNA_VOCAB), HYDRA_CONFIG
        ),
    }
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(repos[repo]))
    monkeypatch.setenv("ENTMTP_CACHE", str(tmp_path / "cache"))
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(QUESTIONS)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return working


def save_a_tree_that_drafts(folder: Path) -> None:
    """Make one the best: with random heads on a tiny model the clock decides if any is."""
    bank = Bank.load(folder)
    extras = (*bank.extras, replace(bank.entries[0], tree=BUSHY))
    best = len(bank.trees)
    replace(bank, extras=extras, best=best).save(folder / "bank.safetensors")


def test_the_readmes_path_is_walked_from_the_first_command_to_the_last(here: Path) -> None:
    block = SECTION.search(README.read_text(encoding="utf-8"))
    assert block
    more: dict[str, list[object]] = {
        "build-bank": [*SIZES, "--data", "questions.jsonl"],
        "decode": ["--max-new-tokens", 8],
    }
    done: dict[str, Result] = {}
    for line in block[1].splitlines():
        _, name, *arguments = shlex.split(line)
        result = run(name, *arguments, *more.get(name, []))
        assert result.exit_code == 0, result.output
        done[line.split(" --out")[0]] = result
        if name == "build-bank":
            save_a_tree_that_drafts(here / "vicuna")
    named = {line.split()[1]: result for line, result in done.items()}
    assert "Hydra prefix-mlp, 4 heads of 4 layers" in named["import-heads"].stdout
    assert read_description(here / "heads")["target"]["name"] == "lmsys/vicuna-7b-v1.3"
    bank = Bank.load(here / "vicuna")
    assert bank.splits["data"]["prompt_mode"] == "vicuna"
    assert "hydra-default verifies 64 rows a pass" in named["explain"].stdout
    plain = run("decode", "vicuna", *more["decode"], "--policy", "none", text="How much?")
    same = run("decode", "vicuna", *more["decode"], text="How much?")
    assert plain.stdout == same.stdout
    assert read(Path("medusa.yml").read_bytes(), "medusa.yml")[0].tree == BUSHY
    assert SglangNumbers.parse(done["entmtp export vicuna --format sglang"].stdout)
    steps = json.loads(Path("adaptive.json").read_text())["candidate_steps"]
    assert set(steps) == {tree.depth for tree in bank.trees} - {0}

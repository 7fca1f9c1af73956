"""`entmtp train-heads`: heads from prompts, resumed, and never mixed with another target's work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import toys
from toy_bank import run, write_prompts

from entmtp_calib.heads import corpus
from entmtp_calib.heads.native import load_heads
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target

SMALL = """
    --max-new-tokens 12 --epochs 1 --n-heads 2 --prefix-width 8 --draft-vocab 0 --held-out 4
    --batch-tokens 256
""".split()


def test_heads_are_trained_and_the_same_command_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.save_rand(tmp_path / "rand", vocab_size=20)
    data = write_prompts(tmp_path / "prompts.jsonl", [f"t{n}" for n in range(20)], 14)
    places = ["--out", tmp_path / "heads", "--work", tmp_path / "work"]
    arguments = [*SMALL, "--model", model, "--prompts", f"words=custom:{data}@12", *places]
    first = run("train-heads", *arguments)
    assert first.exit_code == 0, first.output
    header, row = (line.split() for line in first.stdout.splitlines()[:2])
    assert header[-3:] == ["chain-2", "best-16", "best-63"]
    assert (row[0], row[2]) == ("1", "words")
    assert first.stdout.endswith(f"heads       {tmp_path / 'heads'}\n")
    heads = load_heads(tmp_path / "heads", load_target(model))
    assert (heads.kind, heads.n_heads) == ("hydra", 2)
    assert heads.prefix is not None

    def refuse(target: Target, prompts: Sequence[Any], *_: Any, **__: Any) -> Iterator[Any]:
        assert not prompts, "a text was generated again"
        return iter(())

    monkeypatch.setattr(corpus, "plain_texts", refuse)
    again = run("train-heads", *arguments, "--json", "-")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["history"][0]["words"]["emitted"]["chain-2"] >= 1

    longer = run("train-heads", *arguments, "--max-new-tokens", 13)
    assert (longer.exit_code, longer.stderr.count("\n")) == (1, 1)
    assert "--work" in longer.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "--prompts"),
        (("--prompts", "x=gsm9k"), "--prompts x=gsm9k"),
        (("--prompts", "gsm8k", "--kind", "eagle"), "--kind eagle"),
        (("--prompts", "gsm8k", "--kind", "medusa", "--prefix-width", 8), "--prefix-width"),
        (("--prompts", "gsm8k", "--max-new-tokens", 0), "--max-new-tokens 0"),
        (("--prompts", "gsm8k", "--lr", "nan"), "--lr nan"),
        (("--prompts", "gsm8k", "--dropout", "2"), "--dropout 2"),
    ],
)
def test_a_value_that_can_never_work_is_a_usage_error(
    arguments: tuple[object, ...], reason: str, tmp_path: Path
) -> None:
    result = run("train-heads", "--out", tmp_path / "heads", *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert reason in result.stderr
    assert not list(tmp_path.iterdir())


def test_texts_that_are_missing_are_one_line(tmp_path: Path) -> None:
    result = run("train-heads", "--out", tmp_path / "heads", "--texts", tmp_path / "[/y].jsonl")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "[/y].jsonl does not exist" in result.stderr

"""The bundled prompts: enough of them, all different, and none used for training."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from entmtp_calib.prompts import Prompt, PromptSet, humaneval, load_prompts
from entmtp_calib.prompts.sources import BUNDLED, DATA_FOLDER

TRAINING = {"humaneval": "training/code.jsonl", "sharegpt": "training/chat.jsonl"}
NEAR = 0.8
"""Share of three-word sequences in common at which two prompts are near-duplicates."""


@cache
def bundled(task: str) -> PromptSet:
    return load(task, DATA_FOLDER / BUNDLED[task])


def load(task: str, path: Path) -> PromptSet:
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    return load_prompts(task, path)


def words(prompt: Prompt) -> frozenset[tuple[str, ...]]:
    """All sequences of three words or numbers; numbers count, names of the frame do not."""
    plain = re.findall(r"[a-z]+|\d+", prompt.messages[-1][1].removeprefix(humaneval.INSTRUCTION))
    return frozenset(zip(plain, plain[1:], plain[2:], strict=False)) or frozenset([tuple(plain)])


def nearest(left: Iterable[Prompt], right: Iterable[Prompt]) -> tuple[float, str, str]:
    """(share, id, id) of the two prompts, one of each side, that have most in common."""
    users: defaultdict[tuple[str, ...], list[tuple[Prompt, int]]] = defaultdict(list)
    for prompt in right:
        sequences = words(prompt)
        for sequence in sequences:
            users[sequence].append((prompt, len(sequences)))
    best = (0.0, "", "")
    for prompt in left:
        sequences = words(prompt)
        common = Counter(user for sequence in sequences for user in users[sequence])
        for (other, size), shared in common.items():
            if other is not prompt:
                share = shared / (len(sequences) + size - shared)
                best = max(best, (share, prompt.id, other.id))
    return best


@pytest.mark.parametrize("task", BUNDLED)
def test_there_are_enough_prompts_and_no_row_is_lost(task: str) -> None:
    found = bundled(task)
    assert len(found.prompts) >= 120
    assert found.read == len(found.prompts)


@pytest.mark.parametrize("task", BUNDLED)
def test_no_two_prompts_are_near_duplicates(task: str) -> None:
    share, *pair = nearest(bundled(task).prompts, bundled(task).prompts)
    assert share < NEAR, pair


@pytest.mark.parametrize("task", TRAINING)
def test_no_training_prompt_is_near_a_calibration_prompt(task: str) -> None:
    training = load("custom", DATA_FOLDER / TRAINING[task])
    share, *pair = nearest(training.prompts, bundled(task).prompts)
    assert share < NEAR, pair


@pytest.mark.parametrize("task", BUNDLED)
def test_lengths_vary(task: str) -> None:
    lengths = sorted(len(p.messages[-1][1]) for p in bundled(task).prompts)
    assert lengths[-10] > 1.5 * lengths[10]


def rows(task: str) -> list[dict[str, object]]:
    bundled(task)
    text = (DATA_FOLDER / BUNDLED[task]).read_text(encoding="utf-8")
    return json.loads(text) if text.startswith("[") else [*map(json.loads, text.splitlines())]


def test_arithmetic_answers_end_in_a_number() -> None:
    for row in rows("gsm8k"):
        assert re.search(r"\n#### -?[\d,.]+$", str(row["answer"])), row


def test_code_stubs_are_distinct_python_functions() -> None:
    names = set()
    for row in rows("humaneval"):
        tree = ast.parse(str(row["prompt"]) + str(row["canonical_solution"]))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert row["entry_point"] in functions, row["task_id"]
        assert "def check(candidate)" in str(row["test"])
        names.add(row["entry_point"])
    assert len(names) >= 60


def test_chats_begin_with_the_user_and_alternate() -> None:
    for row in rows("sharegpt"):
        turns = row["conversations"]
        assert isinstance(turns, list)
        roles = [turn["from"] for turn in turns if turn["from"] != "system"]
        assert roles == ["human", "gpt"] * (len(roles) // 2) + ["human"] * (len(roles) % 2), row

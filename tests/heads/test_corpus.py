"""Batched continuation writes what plain decoding writes, and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toys

from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import DataError
from entmtp_calib.heads import corpus
from entmtp_calib.heads.corpus import continue_batch, read_corpus, write_corpus
from entmtp_calib.policy import Static
from entmtp_calib.progress import Silent
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.tree import EMPTY

PROMPTS = [(3, 1, 4), (1, 5, 9, 2, 6), (5,), (3, 5, 8, 9)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = toys.save_rand(tmp_path_factory.mktemp("rand"), config_eos=7)
    return load_target(folder, engine="transformers")


def test_a_batch_writes_what_each_prompt_would_alone(target: Target) -> None:
    alone = Decoder(target, None, [EMPTY])
    expected = [alone.generate(list(ids), Static(0), 40).tokens for ids in PROMPTS]
    assert continue_batch(target, PROMPTS, 40) == expected
    assert len({len(tokens) for tokens in expected}) > 1, "rows should leave at different times"


def test_generation_leaves_the_model_as_it_was(target: Target) -> None:
    before = target.model.config._attn_implementation
    continue_batch(target, PROMPTS[:1], 2)
    assert target.model.config._attn_implementation == before


def test_a_corpus_goes_on_where_it_stopped(target: Target, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "texts.jsonl"
    items = [("math", ids) for ids in PROMPTS]
    whole = write_corpus(target, items, 12, path, Silent())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:15])
    asked: list[int] = []
    monkeypatch.setattr(
        corpus,
        "continue_batch",
        lambda target, prompts, n: asked.append(len(prompts)) or continue_batch(target, prompts, n),
    )
    assert write_corpus(target, items, 12, path, Silent()) == whole
    assert asked == [2]
    assert len(read_corpus(path)) == 4


def test_a_corpus_is_read_whole_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"source": "x", "prompt_ids": [1], "completion_ids": [2, 3]}))
    before = path.read_bytes()
    assert [text.completion_ids for text in read_corpus(path)] == [(2, 3)]
    assert path.read_bytes() == before


def test_a_line_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"source": "x", "prompt_ids": [1]}) + "\n")
    with pytest.raises(DataError, match=r"texts.jsonl line 1.*completion_ids"):
        read_corpus(path)


@pytest.mark.parametrize(
    "change", [{"source": "a/b"}, {"prompt_ids": []}, {"completion_ids": [1, "x"]}]
)
def test_a_text_of_other_types_is_named(change: dict, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    row = {"source": "x", "prompt_ids": [1], "completion_ids": [2], **change}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"texts.jsonl line 1"):
        read_corpus(path)

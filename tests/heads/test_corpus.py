"""A corpus holds what plain decoding writes, is resumed, and is checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import toys

from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import DataError
from entmtp_calib.heads import corpus
from entmtp_calib.heads.corpus import read_corpus, write_corpus
from entmtp_calib.policy import Static
from entmtp_calib.progress import Silent
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.packed import can_pack
from entmtp_calib.targets.texts import plain_texts
from entmtp_calib.tree import EMPTY

ENGINES = ["transformers", *(["lean"] if can_pack() else [])]
PROMPTS = [(3, 1, 4), (1, 5, 9, 2, 6), (5,), (3, 5, 8, 9), (2, 7), (1, 8, 2)]


@pytest.fixture(scope="module", params=ENGINES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = toys.save_rand(tmp_path_factory.mktemp("rand"), config_eos=7)
    return load_target(folder, engine=request.param)


class Interrupted(Exception):
    """As by a user, after some texts."""


def test_a_corpus_is_the_targets_own_greedy_text_and_goes_on_where_it_stopped(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "texts.jsonl"
    items = [("math", ids) for ids in PROMPTS]
    asked: list[int] = []

    def stopping(target: Target, prompts: Sequence[Any], *args: Any, **named: Any) -> Iterator[Any]:
        asked.append(len(prompts))
        for count, text in enumerate(plain_texts(target, prompts, *args, **named)):
            if count == 2:
                raise Interrupted
            yield text

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "plain_texts", stopping)
        for _ in range(2):
            with pytest.raises(Interrupted):
                write_corpus(target, items, 12, path, Silent())
            with path.open("a") as file:
                file.write('{"source": "math", "prom')  # a line that was not finished
    whole = write_corpus(target, items, 12, path, Silent())
    assert asked == [len(PROMPTS), len(PROMPTS) - 2]
    decoder = Decoder(target, None, [EMPTY])
    assert [list(text.completion_ids) for text in whole] == [
        decoder.generate(ids, Static(0), 12).tokens for ids in PROMPTS
    ]
    assert [text.prompt_ids for text in whole] == PROMPTS
    assert len(read_corpus(path)) == len(PROMPTS)
    assert write_corpus(target, items, 12, path, Silent()) == whole


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

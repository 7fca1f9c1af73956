"""Streaming: pieces that joined are the text, with no character shown in halves."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from entmtp_calib.stages.decode import Streamer

TEXT = "a😀b\n\ufffd é[/b]"


@pytest.fixture(scope="module")
def bytewise() -> PreTrainedTokenizerFast:
    """A tokenizer with a token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
def test_the_pieces_joined_are_the_text(bytewise: PreTrainedTokenizerFast, block: int) -> None:
    ids = bytewise.encode(TEXT)
    assert len(ids) == len(TEXT.encode())
    streamer = Streamer(bytewise)
    pieces = [streamer.add(ids[at : at + block]) for at in range(0, len(ids), block)]
    assert "".join([*pieces, streamer.finish()]) == TEXT


def test_a_character_is_held_back_until_it_is_whole(bytewise: PreTrainedTokenizerFast) -> None:
    streamer = Streamer(bytewise)
    assert [streamer.add([token]) for token in bytewise.encode("a😀b")] == [
        *("a", "", "", "", "😀", "b")
    ]
    assert streamer.finish() == ""


@pytest.mark.parametrize("n_bytes", [1, 2, 3])
def test_a_text_that_ends_inside_a_character_shows_that_once(
    bytewise: PreTrainedTokenizerFast, n_bytes: int
) -> None:
    streamer = Streamer(bytewise)
    ids = bytewise.encode("x😀")[: 1 + n_bytes]
    shown = streamer.add(ids) + streamer.finish()
    assert shown == bytewise.decode(ids)
    assert shown.startswith("x\ufffd")

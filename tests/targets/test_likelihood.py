"""The likelihood of a text: a known Markov chain's, in chunks of any size."""

from __future__ import annotations

import numpy as np
import pytest
import toys

from entmtp_calib.errors import DataError
from entmtp_calib.targets import likelihood
from entmtp_calib.targets.likelihood import mean_nll

TEXT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 7, 7, 0]


def test_it_is_the_mean_of_the_transitions_of_a_markov_chain() -> None:
    table = toys.markov_table()
    for cut in (1, 2, 7, len(TEXT) - 1):
        steps = [-np.log(table[a, b]) for a, b in zip(TEXT[cut - 1 :], TEXT[cut:], strict=False)]
        found = mean_nll(toys.markov(), TEXT[:cut], TEXT[cut:])
        assert found == pytest.approx(np.mean(steps), abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 12, 13])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [token % 10 for token in TEXT]
    whole = mean_nll(toys.rand(), text[:5], text[5:])
    monkeypatch.setattr(likelihood, "CHUNK_ROWS", chunk)
    assert mean_nll(toys.rand(), text[:5], text[5:]) == pytest.approx(whole, rel=1e-5)


def test_a_text_may_end_at_the_last_position() -> None:
    target = toys.rand()
    ids = [n % 10 for n in range(target.max_positions + 1)]
    assert mean_nll(target, ids[:-1], ids[-1:]) > 0


@pytest.mark.parametrize(("prompt", "text"), [([], [1]), ([1], [])])
def test_nothing_has_no_likelihood(prompt: list[int], text: list[int]) -> None:
    with pytest.raises(DataError, match="at least one token in both"):
        mean_nll(toys.rand(), prompt, text)

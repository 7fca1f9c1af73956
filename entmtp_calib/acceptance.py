"""The target's choices and a tree's tokens, to the accepted path; and where a text ends.

A step's tokens are its root followed by the accepted nodes: `emitted_tokens` is
`accepted_draft_tokens` + 1. The root is the target's own choice, so it always counts; it is emitted
by the step that it starts, and the target's choice after the last accepted node only becomes the
next step's root. When a root ends the text (end of sequence, or one token of room left) the step
is terminal: it emits the root and needs no target pass. This module knows no models and no trees'
paths, only rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Literal, Protocol

from entmtp_calib.config import AcceptanceConfig

FinishReason = Literal["stop", "length"]


class ByRow(Protocol):
    """Something with a token per row: a list, or choices that are made when looked at."""

    def __getitem__(self, row: int, /) -> int: ...


def accept(parents: Sequence[int], tokens: Sequence[int], choices: ByRow) -> list[int]:
    """Rows of the accepted path in order, the root's row 0 left out.

    Args:
        parents: [n + 1] parent row of each row; parents stand before their children.
        tokens: [n + 1] token of each row, the root first.
        choices: [n + 1] what the target chooses after each row; read on the accepted path only.

    From the root, move to the child whose token is the target's choice. Of siblings with equal
    tokens the lowest row wins. Lists are faster than arrays here.
    """
    accepted: list[int] = []
    row = 0
    for node in range(1, len(parents)):
        if parents[node] == row and tokens[node] == choices[row]:
            accepted.append(node)
            row = node
    return accepted


def accept_typical(
    parents: Sequence[int],
    probs: Sequence[float],
    nats: Sequence[float],
    rule: AcceptanceConfig,
) -> list[int]:
    """Rows of the longest path of typical tokens, the root's row 0 left out: not lossless.

    Args:
        parents: [n + 1] parent row of each row; parents stand before their children.
        probs: [n + 1] the target's probability of each row's token after its parent; the root's is
            not looked at.
        nats: [n + 1] entropy of the distribution that it is from.
        rule: a token is typical where its probability is above
            min(epsilon, alpha * exp(-entropy)).

    Of paths of equal length the one that ends in the lowest row wins.
    """
    lengths = [0] + [-1] * (len(parents) - 1)  # of the typical path to each row; -1: there is none
    for row in range(1, len(parents)):
        threshold = min(rule.epsilon, rule.alpha * math.exp(-nats[row]))
        if lengths[parents[row]] >= 0 and probs[row] > threshold:
            lengths[row] = lengths[parents[row]] + 1
    row = lengths.index(max(lengths))
    path: list[int] = []
    while row:
        path.append(row)
        row = parents[row]
    return path[::-1]


def truncate(
    tokens: Sequence[int], eos_ids: Set[int], room: int
) -> tuple[list[int], FinishReason | None]:
    """Cut a step's tokens after the first end-of-sequence token (kept), or where room ends.

    Args:
        tokens: the step's emitted tokens, root first.
        eos_ids: tokens that end a text.
        room: how many more tokens the text may have.

    Returns:
        The tokens that count, and why the text ends here: "stop" at an end-of-sequence token
        within the room, "length" when the room is used up, None when the text goes on.
    """
    kept = list(tokens[:room])
    for index, token in enumerate(kept):
        if token in eos_ids:
            return kept[: index + 1], "stop"
    return kept, "length" if len(kept) >= room else None

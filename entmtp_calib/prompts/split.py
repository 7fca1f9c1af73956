"""Disjoint splits, decided by each prompt's text and a seed.

A bank that is chosen and judged on the same text looks better than it is. The order is that of a
hash of the text, so that neither the order of the file nor its format moves a prompt from one
split to another. This module knows no stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from entmtp_calib.errors import DataError, UsageError
from entmtp_calib.prompts.values import Prompt


@dataclass(frozen=True)
class Splits:
    """search: grow trees and fit on it; select: choose on it; report: only the final figures."""

    search: tuple[Prompt, ...]
    select: tuple[Prompt, ...]
    report: tuple[Prompt, ...]


def split(prompts: Sequence[Prompt], sizes: tuple[int, int, int], seed: int) -> Splits:
    """(search, select, report) of the given sizes, without a text in common."""
    if min(sizes) < 0:
        raise UsageError(f"split sizes {sizes}", "none below 0")
    unique = {prompt.key: prompt for prompt in reversed(prompts)}
    order = sorted(unique, key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
    search, select, report = sizes
    if sum(sizes) > len(order):
        raise DataError(
            f"{len(order)} distinct prompts are available",
            f"{sum(sizes)} for the splits: {search} search, {select} select, {report} report",
            "pass a larger file with --data, or ask for smaller splits",
        )
    chosen = [unique[key] for key in order[: sum(sizes)]]
    return Splits(
        tuple(chosen[:search]),
        tuple(chosen[search : search + select]),
        tuple(chosen[search + select :]),
    )

"""Racing: which methods can still win, from timed runs of some prompts in some rounds.

Methods are compared on the runs that both have, prompt by prompt, each prompt counting once however
often it was run. A method is beaten where one of no greater size is surely faster: then it cannot
be on the frontier of size and speed, and further runs would only tell how slow it is. This module
knows no trees, no models and no clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from entmtp_calib.timing import Interval, mean_interval, paired_bootstrap

Timed = tuple[float, float]
"""Tokens and seconds of one text."""
Runs = Mapping[tuple[int, int], Timed]
"""A method's runs by prompt and round."""

MARGIN = 0.02
"""What a method must surely lose by. It is asked after every prompt, and an interval that is asked
often is left by chance more often than once in twenty times."""


def runs_by_method(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[tuple[int, int], Timed]]:
    """The runs in rows of the timing table, by the method's name; other kinds are passed over."""
    runs: dict[str, dict[tuple[int, int], Timed]] = {}
    for row in rows:
        if row["kind"] == "end_to_end":
            mine = runs.setdefault(row["tree"], {})
            mine[row["prompt"], row["round"]] = (row["tokens"], row["seconds"])
    return runs


def rate(runs: Runs) -> Interval:
    """Tokens per second."""
    return mean_interval(*_by_prompt(runs))


def ratio(mine: Runs, base: Runs) -> Interval:
    """Tokens per second of a method over those of another, on the runs that both have."""
    both = mine.keys() & base.keys()
    first, second = (_by_prompt({key: runs[key] for key in both}) for runs in (mine, base))
    return paired_bootstrap(*first, *second)


def beaten(runs: Mapping[str, Runs], sizes: Mapping[str, int]) -> set[str]:
    """The methods that are surely slower than the fastest one of no greater size.

    Args:
        runs: of each method that is in the race; all have the same ones.
        sizes: of each method.
    """
    value = {name: rate(mine).value for name, mine in runs.items()}
    out = set()
    for name, mine in runs.items():
        leader = max((n for n in runs if sizes[n] <= sizes[name]), key=value.__getitem__)
        if ratio(mine, runs[leader]).high < 1 - MARGIN:
            out.add(name)
    return out


def _by_prompt(runs: Runs) -> tuple[list[float], list[float]]:
    """[P] each, in the prompts' order: mean tokens and mean seconds of a prompt's runs."""
    each: dict[int, list[Timed]] = {}
    for (prompt, _), run in sorted(runs.items()):
        each.setdefault(prompt, []).append(run)
    tokens = [fmean(run[0] for run in of_prompt) for of_prompt in each.values()]
    return tokens, [fmean(run[1] for run in of_prompt) for of_prompt in each.values()]

"""The prompts of a bench: never one that had a say in the bank.

A bank looks better than it is on prompts that its trees were grown on or chosen by. By default the
bank's own report split is used; other data is taken in the order of the seeded split, without the
texts of the bank's search and select splits. This module knows no method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entmtp_calib.bank import Bank
from entmtp_calib.config import BuildConfig
from entmtp_calib.errors import DataError, EntmtpError, UsageError
from entmtp_calib.prompts import Prompt, load_prompts, split
from entmtp_calib.stages.decode import Session
from entmtp_calib.stages.recorded import SPLITS
from entmtp_calib.stages.run_prompts import Encoded
from entmtp_calib.stages.setup import read_settings, run_folder_of
from entmtp_calib.tree import HYDRA_DEFAULT


@dataclass(frozen=True)
class Unused:
    """Prompts that chose nothing, in the order in which they are taken.

    Attributes:
        prompts: all there are.
        report: ids of the bank's report split, which stands in front; none in other data.
        data: one line on where they come from.
        task: the data's.
        notes: what a reader should know.
    """

    prompts: tuple[Prompt, ...]
    report: frozenset[str]
    data: str
    task: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Taken:
    """The prompts that are run.

    Attributes:
        prompts: as tokens.
        too_long: ids of those that were passed over.
        origin: in words, which part of the data they are.
    """

    prompts: tuple[Encoded, ...]
    too_long: tuple[str, ...]
    origin: str


def unused_prompts(
    bank_path: Path, bank: Bank, task: str | None = None, data: str | None = None
) -> Unused:
    """The prompts that a bench of this bank may use.

    Args:
        bank_path: where the bank was loaded from; its run folder names its data.
        task, data: other than the bank's.

    Raises:
        DataError: the bank's own data is not what it was, or no prompt is left.
    """
    is_own = data is None and task in (None, bank.task)
    source = _own_data(bank_path) if is_own else data
    found = load_prompts(task or bank.task, source)
    notes: list[str] = []
    parts = None
    if is_own and bank.splits.get("report"):
        parts = _recorded(bank, found.prompts, found.source)
    elif bank.splits.get("search"):
        parts = _recorded_elsewhere(bank_path, bank)
    if parts is None:
        notes.append("which prompts chose the bank's trees cannot be told; some may be among these")
    chose = {p.key for name in ("search", "select") for p in (parts or {}).get(name, ())}
    left = [prompt for prompt in found.prompts if prompt.key not in chose]
    if not left:
        raise DataError(f"every prompt of {found.source} chose the bank's trees", "other prompts")
    ordered = split(left, (0, 0, len(left)), bank.seeds.get("splits", 0)).report
    report = frozenset(prompt.id for prompt in parts["report"]) if is_own and parts else frozenset()
    ordered = tuple(sorted(ordered, key=lambda prompt: prompt.id not in report))
    return Unused(
        prompts=ordered,
        report=report,
        data=found.describe(),
        task=task or bank.task,
        notes=tuple(notes),
    )


def take(unused: Unused, session: Session, count: int | None, max_new_tokens: int) -> Taken:
    """The first prompts that leave room for the text, as tokens.

    Args:
        count: how many; None for the report split, or as many as one usually has.
        max_new_tokens: per prompt.

    Raises:
        UsageError: the model has too few positions for any prompt.
        DataError: no prompt leaves room.
    """
    # As in a bank's run: every tree finds its positions at every step.
    deepest = max(session.heads.n_heads, HYDRA_DEFAULT.depth)
    positions = session.target.max_positions - deepest
    if positions <= max_new_tokens:
        raise UsageError(
            f"--max-new-tokens {max_new_tokens}",
            f"less than {positions}, the positions of {session.target.name} less those of a tree",
        )
    count = count or len(unused.report) or BuildConfig().report_prompts
    taken: list[Encoded] = []
    too_long: list[str] = []
    for prompt in unused.prompts:
        if len(taken) == count:
            break
        ids = tuple(session.encode(prompt))
        if len(ids) + max_new_tokens <= positions:
            taken.append(Encoded(prompt.id, ids))
        else:
            too_long.append(prompt.id)
    if not taken:
        raise DataError(
            f"{len(too_long)} prompts that are too long for {max_new_tokens} new tokens",
            f"prompts of at most {positions - max_new_tokens} tokens",
            "pass a smaller --max-new-tokens, or shorter prompts with --data",
        )
    return Taken(tuple(taken), tuple(too_long), _origin(taken, unused.report))


def _origin(taken: Sequence[Encoded], report: frozenset[str]) -> str:
    if not report:
        return "in seeded order"
    only = all(prompt.id in report for prompt in taken)
    return "of the bank's report split" + ("" if only else " and behind it")


def _own_data(bank_path: Path) -> str | None:
    folder = run_folder_of(bank_path)
    return read_settings(folder)[1].data if folder else None


def _recorded(bank: Bank, prompts: Sequence[Prompt], source: str) -> dict[str, Any]:
    """The bank's splits as prompts.

    Their order is that of a hash of the texts, so if it comes out again, the texts are the same.
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    ids = [list(bank.splits.get(name, [])) for name in SPLITS]
    there = [by_id[i] for part in ids for i in part if i in by_id]
    sizes = (len(ids[0]), len(ids[1]), len(ids[2]))
    if len(there) == sum(sizes):
        again = split(there, sizes, bank.seeds.get("splits", 0))
        parts = {name: getattr(again, name) for name in SPLITS}
        if [[prompt.id for prompt in parts[name]] for name in SPLITS] == ids:
            return parts
    raise DataError(
        f"{source} no longer holds the prompts that the bank was built on",
        "its search, select and report prompts",
        "name other prompts with --data FILE",
    )


def _recorded_elsewhere(bank_path: Path, bank: Bank) -> dict[str, Any] | None:
    """The same from the bank's own data while other data is used; None where it is gone."""
    try:
        own = load_prompts(bank.task, _own_data(bank_path), offline=True)
        return _recorded(bank, own.prompts, own.source)
    except EntmtpError:
        return None

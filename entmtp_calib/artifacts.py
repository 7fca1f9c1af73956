"""Run folders: one process at a time, finished stages reused, manifest last.

A folder holds `run.json` (the resolved configuration, and per stage the hash of its inputs and of
each output, and what its work took), the stages' files, and, once everything is there,
`manifest.json` with the hash of every file. Files appear only when they are complete, so a run that
was killed at any moment can be resumed, and what has not changed is not computed again. This module
knows neither models nor what the stages compute; what is wrong with a folder is one
`ArtifactError`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from entmtp_calib import files
from entmtp_calib.errors import ArtifactError
from entmtp_calib.files import writing
from entmtp_calib.locks import acquire, release
from entmtp_calib.parts import Parts
from entmtp_calib.provenance import peak_memory_bytes, sha256_json
from entmtp_calib.records import FORMAT_VERSION, strict_json

if TYPE_CHECKING:
    import pyarrow as pa

RUN, MANIFEST, LOCK, PARTS = "run.json", "manifest.json", ".lock", ".parts"

_MADE_BY = {
    "trace.parquet": "entmtp rollout",
    "grown.parquet": "entmtp grow",
    "costs.parquet": "entmtp time",
    "candidates.parquet": "entmtp recalibrate",
    "live.parquet": "entmtp recalibrate",
    "timing.parquet": "entmtp time",
}
_MADE_BY_DEFAULT = "entmtp build-bank"


@dataclass(frozen=True)
class Effort:
    """What a finished stage took, its interrupted tries included as far as their parts were kept.

    Attributes:
        seconds: None where an earlier version did not note it.
        peak_bytes: the most memory that its last process had resident until then; None likewise.
        reused: an earlier process did the work.
    """

    seconds: float | None
    peak_bytes: int | None
    reused: bool


class RunFolder:
    """One run's folder: `create` locks it for writing, `open` only reads.

    Use it as a context manager, or call `close`, to give the lock back.
    """

    def __init__(self, path: Path, run: dict[str, Any], lock: IO[str] | None) -> None:
        self.path = path
        self._run = run
        self._lock = lock
        self._begun: dict[str, Parts] = {}
        self._finished_here: set[str] = set()

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """A new folder, or an earlier one to go on with, locked, under this configuration.

        What earlier stages finished stays known; whether it still counts is `is_done`'s to say.

        Raises:
            BusyError: another process is at work in the folder.
            ArtifactError: the folder cannot be written, or its `run.json` is damaged.
        """
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as on_failure:
            lock = acquire(path / LOCK)
            on_failure.callback(release, path / LOCK, lock)
            earlier = _read_run(path) if (path / RUN).exists() else {"stages": {}}
            run = {"format_version": FORMAT_VERSION, "config": config, "stages": earlier["stages"]}
            folder = cls(path, json.loads(strict_json(run)), lock)
            _remove_temporaries(path)
            if folder._run != earlier:
                folder._save_run()
            on_failure.pop_all()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder, for reading."""
        if not (path / RUN).is_file():
            found = f"{path} has no {RUN}" if path.is_dir() else f"there is no folder {path}"
            raise ArtifactError(found, "a run folder", f"make one with {_MADE_BY_DEFAULT}")
        return cls(path, _read_run(path), None)

    def close(self) -> None:
        """Give the lock back."""
        if self._lock:
            release(self.path / LOCK, self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as it stands in `run.json`."""
        config: dict[str, Any] = self._run["config"]
        return config

    def file(self, name: str) -> Path:
        """The path of one of the folder's files, which must exist."""
        path = self.path / name
        if not path.is_file():
            command = _MADE_BY.get(name, _MADE_BY_DEFAULT)
            raise ArtifactError(f"{path} is missing", action=f"make it with {command}")
        return path

    def sha256(self, name: str) -> str:
        """Hash of one of the folder's files: an input of the stages that read it."""
        return files.hash_file(self.file(name))

    def write_table(self, name: str, table: pa.Table) -> None:
        """Write a table as Parquet, whole or not at all."""
        self._before_change()
        files.write_table(self.path / name, table)

    def read_table(self, name: str, schema: pa.Schema) -> pa.Table:
        """Read a table that must have exactly this schema."""
        return files.read_table(self.file(name), schema)

    def write_json(self, name: str, value: Any) -> None:
        """Write strict JSON, whole or not at all."""
        self._before_change()
        files.write_json(self.path / name, value)

    def read_json(self, name: str) -> Any:
        """Read a JSON file."""
        return files.read_json(self.file(name))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        self._before_change()
        files.write_bytes(self.path / name, data)

    def is_done(self, stage: str, inputs: Any) -> bool:
        """Whether the stage finished from these inputs and its outputs are still as it left them.

        Args:
            stage: its name.
            inputs: everything its result depends on, as JSON values: settings, hashes of files.
        """
        record = self._run["stages"].get(stage)
        return (
            record is not None
            and record["inputs"] == sha256_json(inputs)
            and all(
                (self.path / name).is_file() and self.sha256(name) == digest
                for name, digest in record["outputs"].items()
            )
        )

    def mark_done(
        self, stage: str, inputs: Any, outputs: Iterable[str], seconds: float | None = None
    ) -> None:
        """Record that the stage has written its outputs, and its effort; its parts are removed.

        Args:
            seconds: how long its work took; else what has passed since `partial`, and before it.
        """
        self._before_change()
        parts = self._begun.pop(stage, None)
        if seconds is None and parts:
            seconds = parts.seconds
        self._run["stages"][stage] = {
            "inputs": sha256_json(inputs),
            "outputs": {name: self.sha256(name) for name in outputs},
            "seconds": seconds,
            "peak_bytes": peak_memory_bytes(),
        }
        self._finished_here.add(stage)
        self._save_run()
        _remove_folder(self.path / PARTS / stage)

    def effort(self, stage: str) -> Effort | None:
        """What the stage took; None for one that is not done."""
        record = self._run["stages"].get(stage)
        if record is None:
            return None
        reused = stage not in self._finished_here
        return Effort(record.get("seconds"), record.get("peak_bytes"), reused)

    def partial(self, stage: str, inputs: Any) -> Parts:
        """Where the stage keeps finished parts of its work until `mark_done`; its clock runs now.

        Parts of an earlier try are there again, unless they were made from other inputs. No
        manifest lists them, so a complete folder stays complete.
        """
        self._check_locked()
        place = self.path / PARTS / stage / sha256_json(inputs)[:16]
        if not place.is_dir():
            _remove_folder(place.parent)
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
        _remove_temporaries(place)
        self._begun[stage] = Parts(place)
        return self._begun[stage]

    def finish(self, provenance: Mapping[str, Any]) -> None:
        """Write the manifest, the last file of a complete run."""
        self._before_change()
        _remove_folder(self.path / PARTS)
        listed = {
            name: {"sha256": self.sha256(name), "bytes": self.file(name).stat().st_size}
            for name in _file_names(self.path)
        }
        manifest = {"format_version": FORMAT_VERSION, "files": listed, "provenance": provenance}
        files.write_json(self.path / MANIFEST, manifest)

    def verify(self) -> None:
        """Check every file against the manifest.

        Raises:
            ArtifactError: naming every file that is missing or damaged, or the format version.
        """
        path = self.path / MANIFEST
        if not path.is_file():
            found = f"{self.path} has no {MANIFEST}: the run is unfinished"
            raise ArtifactError(found, action="run the same command again; it resumes")
        listed = files.read_versioned(path, {"files": dict})["files"]
        files.check_keys(path, listed, dict.fromkeys(listed, dict))
        missing = [name for name in listed if not (self.path / name).is_file()]
        changed = [
            name
            for name, entry in listed.items()
            if name not in missing and self.sha256(name) != entry.get("sha256")
        ]
        if missing or changed:
            problems = [f"{name} is missing" for name in missing]
            problems += [f"{name} is damaged or was changed after the run" for name in changed]
            action = f"restore the folder, or make it again with {_MADE_BY_DEFAULT}"
            raise ArtifactError(f"in {self.path} {', '.join(problems)}", action=action)

    def _before_change(self) -> None:
        """A folder that is changing is not complete: its manifest goes first."""
        self._check_locked()
        with writing(self.path / MANIFEST):
            (self.path / MANIFEST).unlink(missing_ok=True)

    def _check_locked(self) -> None:
        if not self._lock:
            raise RuntimeError(f"{self.path} is open for reading only")

    def _save_run(self) -> None:
        self._before_change()
        files.write_json(self.path / RUN, self._run)


def _read_run(path: Path) -> dict[str, Any]:
    run = files.read_versioned(path / RUN, {"config": dict, "stages": dict})
    files.check_keys(path / RUN, run["stages"], dict.fromkeys(run["stages"], dict))
    for record in run["stages"].values():
        files.check_keys(path / RUN, record, {"inputs": str, "outputs": dict})
    return run


def _file_names(path: Path) -> list[str]:
    """The files that a manifest lists, relative to the folder; nothing hidden."""
    names = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    return sorted(
        name.as_posix()
        for name in names
        if name.as_posix() != MANIFEST and not any(part.startswith(".") for part in name.parts)
    )


def _remove_folder(path: Path) -> None:
    with writing(path), suppress(FileNotFoundError):
        shutil.rmtree(path)


def _remove_temporaries(path: Path) -> None:
    """What killed writers left; nobody else is writing, since the folder is locked."""
    with writing(path):
        for left in path.glob(f"{files.TEMPORARY}-*"):
            left.unlink(missing_ok=True)

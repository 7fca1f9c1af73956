"""Run folders: one process at a time, finished stages reused, manifest last.

A folder holds `run.json` (the resolved configuration, and per stage the hash of its inputs and of
each output), the stages' files, and, once everything is there, `manifest.json` with the hash of
every file. Files appear only when they are complete, so a run that was killed at any moment can be
resumed, and what has not changed is not computed again. This module knows neither models nor what
the stages compute; what is wrong with a folder is one `ArtifactError`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from entmtp_calib import files
from entmtp_calib.errors import ArtifactError, BusyError
from entmtp_calib.files import writing
from entmtp_calib.provenance import sha256_json
from entmtp_calib.records import FORMAT_VERSION, strict_json

if TYPE_CHECKING:
    import pyarrow as pa

RUN, MANIFEST, LOCK, PARTS = "run.json", "manifest.json", ".lock", ".parts"

_MADE_BY = {
    "trace.parquet": "entmtp rollout",
    "grown.parquet": "entmtp grow",
    "costs.parquet": "entmtp time",
    "candidates.parquet": "entmtp recalibrate",
    "timing.parquet": "entmtp time",
}
_MADE_BY_DEFAULT = "entmtp build-bank"


class RunFolder:
    """One run's folder: `create` locks it for writing, `open` only reads.

    Use it as a context manager, or call `close`, to give the lock back.
    """

    def __init__(self, path: Path, run: dict[str, Any], lock: IO[str] | None) -> None:
        self.path = path
        self._run = run
        self._lock = lock

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
            lock = _acquire(path / LOCK)
            on_failure.callback(_release, path / LOCK, lock)
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
            _release(self.path / LOCK, self._lock)
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
        """Record that the stage has written its outputs; its parts are removed.

        Args:
            seconds: how long its work took, where that is worth knowing.
        """
        self._before_change()
        record: dict[str, Any] = {
            "inputs": sha256_json(inputs),
            "outputs": {name: self.sha256(name) for name in outputs},
        }
        self._run["stages"][stage] = record if seconds is None else record | {"seconds": seconds}
        self._save_run()
        _remove_folder(self.path / PARTS / stage)

    def seconds(self, stage: str) -> float | None:
        """How long the stage's work took; None where nobody has noted it."""
        seconds: float | None = self._run["stages"].get(stage, {}).get("seconds")
        return seconds

    def partial(self, stage: str, inputs: Any) -> Parts:
        """Where the stage keeps finished parts of its work until `mark_done`.

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
        return Parts(place)

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


class Parts:
    """Numbered results of one stage's work, each whole or absent, so that it can be resumed.

    A number has a table, a JSON value, or both.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def tables(self) -> list[int]:
        """The numbers that have a table, rising."""
        return self._numbers("parquet")

    def values(self) -> list[int]:
        """The numbers that have a JSON value, rising."""
        return self._numbers("json")

    def write_table(self, number: int, table: pa.Table) -> None:
        files.write_table(self._file(number, "parquet"), table)

    def read_table(self, number: int, schema: pa.Schema) -> pa.Table:
        return files.read_table(self._file(number, "parquet"), schema)

    def write_json(self, number: int, value: Any) -> None:
        files.write_json(self._file(number, "json"), value)

    def read_json(self, number: int) -> Any:
        return files.read_json(self._file(number, "json"))

    def _file(self, number: int, kind: str) -> Path:
        return self.path / f"{number:06d}.{kind}"

    def _numbers(self, kind: str) -> list[int]:
        return sorted(int(path.stem) for path in self.path.glob(f"[0-9]*.{kind}"))


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


def _acquire(path: Path) -> IO[str]:
    """Lock the folder by its lock file, which names the holder.

    The system frees the lock of a process that has died, however it did.
    """
    while True:
        with writing(path), ExitStack() as on_failure:
            lock = on_failure.enter_context(path.open("a+", encoding="utf-8"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise BusyError(
                    f"{path.parent} is in use by process {lock.read().strip() or 'unknown'}",
                    action="wait until it has finished, or choose another folder",
                ) from None
            if _is_at(path, lock):  # else its last holder has just removed it
                lock.truncate(0)
                lock.write(str(os.getpid()))
                lock.flush()
                on_failure.pop_all()
                return lock


def _release(path: Path, lock: IO[str]) -> None:
    with suppress(OSError):  # the lock goes with the file handle; the file is only a name
        path.unlink(missing_ok=True)
    lock.close()


def _is_at(path: Path, lock: IO[str]) -> bool:
    """Whether the open file is the one that has this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    return False

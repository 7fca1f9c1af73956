"""What this machine has, and everything the main job (`build-bank` on the embedded default) lacks.

All checks always run, so that one look shows all problems; each problem says what to run. Nothing
that is examined is needed to examine it: a missing torch is a finding, not a crash. This module
knows nothing of models other than the default one.
"""

from __future__ import annotations

import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from entmtp_calib.config import DEFAULT_HEADS_NAME
from entmtp_calib.errors import EntmtpError
from entmtp_calib.prompts import hub
from entmtp_calib.prompts.sources import BUNDLED, DATA_FOLDER
from entmtp_calib.provenance import hardware
from entmtp_calib.targets.default import cache_root, packaged_gguf

HEADS = Path(__file__).parents[2] / "artifacts" / "heads"
RUNS = Path("artifacts", "banks")
DISTRIBUTION = "entmtp"
SETUP = "run `make setup`"
MEMORY_GIB, CACHE_GIB, RUNS_GIB = 2.0, 1.0, 0.2  # what the main job needs


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        value: what is there.
        problem: why the main job cannot run with it, and what to run; empty if it can.
    """

    name: str
    value: str
    problem: str = ""


def examine() -> list[Finding]:
    """Look at everything; nothing is changed."""
    return [
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        *_machine(),
        *_libraries(),
        *_devices(),
        *_default_model(),
        _heads(),
        _prompts(),
        _folder("run folders", RUNS, RUNS_GIB, "run entmtp in another folder, or free some space"),
        _hub(),
    ]


def _problem(found: str, expected: str, action: str) -> str:
    return str(EntmtpError(found, expected, action))


def _machine() -> Iterator[Finding]:
    facts = hardware()
    cores = f"{facts['usable_cores']} usable of {facts['logical_cores']}"
    yield Finding("processor", f"{facts['cpu']}, {cores} cores")
    memory = facts["memory_gib"]
    small = memory is not None and memory < MEMORY_GIB
    needs = f"at least {MEMORY_GIB:g} GiB"
    yield Finding(
        "memory",
        "not known" if memory is None else f"{memory:g} GiB",
        _problem(f"{memory:g} GiB of memory", needs, "use a larger machine") if small else "",
    )


def _libraries() -> Iterator[Finding]:
    """The packages that entmtp declares it needs, as they are installed."""
    try:
        version, declared = metadata.version(DISTRIBUTION), metadata.requires(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield Finding("entmtp", "-", _problem("entmtp is not installed", "a package", SETUP))
        return
    yield Finding("entmtp", version)
    for line in declared or []:
        requirement = re.fullmatch(r"([\w.-]+?)>=([\d.]+)", line)  # extras carry a marker
        if requirement:
            yield _library(*requirement.groups())


def _library(name: str, least: str) -> Finding:
    action = f"{SETUP}, or `pip install '{name}>={least}'`"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "-", _problem(f"{name} is not installed", f"{least} or later", action))
    if _release(version) < _release(least):
        return Finding(
            name, version, _problem(f"{name} {version} is too old", f"{least} or later", action)
        )
    return Finding(name, version)


def _release(version: str) -> list[int]:
    """`2.13.0+cpu` as [2, 13, 0], for comparison."""
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def _devices() -> Iterator[Finding]:
    """The devices, and the engine that is chosen on each of them."""
    try:
        import torch
    except (ImportError, OSError) as error:
        problem = _problem(f"torch cannot be imported ({error})", "a working torch", SETUP)
        yield Finding("devices", "-", problem)
        return
    from entmtp_calib.targets.packed import can_pack

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus]
    yield Finding("devices", ", ".join([*names, f"CPU ({torch.get_num_threads()} threads)"]))
    lean = "lean for models like Llama, transformers for others"
    on_cpu = lean if can_pack() else "transformers, since this torch has no FBGEMM kernels"
    yield Finding("engines", "graphed on CUDA; " * bool(gpus) + f"on a CPU {on_cpu}")


def _default_model() -> Iterator[Finding]:
    """The package that carries the default model, and the cache it is converted into."""
    try:
        yield Finding("default model", str(packaged_gguf()))
    except EntmtpError as error:
        yield Finding("default model", "-", str(error))
    yield _folder("cache", cache_root(), CACHE_GIB, "set ENTMTP_CACHE to another folder")


def _folder(name: str, folder: Path, least_gib: float, action: str) -> Finding:
    """Whether a folder can be made and written, and has room."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            free_gib = shutil.disk_usage(there).free / 2**30
    except OSError as error:
        found = f"cannot write in {folder}: {error.strerror}"
        return Finding(name, str(folder), _problem(found, "a writable folder", action))
    value = f"{folder}, {free_gib:.1f} GiB free"
    if free_gib < least_gib:
        found = f"{folder} has {free_gib:.1f} GiB free"
        return Finding(name, value, _problem(found, f"at least {least_gib:g} GiB", action))
    return Finding(name, value)


def _heads() -> Finding:
    names = sorted(file.parent.name for file in HEADS.glob("*/heads.safetensors"))
    names = names if DEFAULT_HEADS_NAME in names else []
    if names:
        return Finding("heads", f"{', '.join(names)} in {HEADS}")
    action = "restore the folder from the repository, or run `make heads`"
    return Finding("heads", "-", _problem(f"no heads in {HEADS}", "the default ones", action))


def _prompts() -> Finding:
    """The prompts written for this project; with them the hub is not needed."""
    missing = [name for name in BUNDLED.values() if not (DATA_FOLDER / name).is_file()]
    if missing:
        found = f"{', '.join(missing)} not in {DATA_FOLDER}"
        action = "restore the folder from the repository, or pass --data FILE"
        return Finding("bundled prompts", "-", _problem(found, "the bundled prompts", action))
    return Finding("bundled prompts", f"{', '.join(BUNDLED)} in {DATA_FOLDER}")


def _hub() -> Finding:
    reason = hub.unreachable(hub.PRESETS["gsm8k"])
    return Finding("hub", f"{reason}: bundled prompts are used" if reason else "answers")

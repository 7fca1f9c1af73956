"""Where a number comes from: machine, versions, command line, seeds, hashes.

The facts that decide speed (processor, cores this process may use, threads, device, torch) make the
hardware fingerprint: costs measured under another one are not this machine's. Cores are counted as
the scheduler and the container grant them, not as the host has them. Nothing here names the user or
the host. This module knows no run folders and never imports torch; it asks a torch that is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from entmtp_calib.records import canonical_json

PACKAGE = "entmtp"
LIBRARIES = (PACKAGE, "torch", "transformers", "numpy", "pyarrow", "safetensors", "tokenizers")

# What decides speed, and how to call it when it differs.
_SPEED_FACTS = {
    "cpu": "processor",
    "usable_cores": "usable cores",
    "torch_threads": "threads",
    "device_name": "device",
    "torch_version": "torch",
}


def provenance(
    command: Sequence[str],
    seeds: Mapping[str, int],
    extra: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Everything that must stand beside a measured number.

    Args:
        command: the command line, argument by argument.
        seeds: every seed in use, by name.
        extra: facts of the caller, such as model and data hashes.
        device: the device that computed, "cpu" or "cuda:0".
    """
    facts = hardware(device)
    return {
        "command": shlex.join(command),
        "seeds": dict(seeds),
        "time": utc_now(),
        "hardware": facts,
        "hardware_fingerprint": hardware_fingerprint(facts),
        "versions": {name: found for name in LIBRARIES if (found := _version(name))},
        "python": platform.python_version(),
        "os": platform.platform(),
        **(extra or {}),
    }


def hardware(device: str = "cpu") -> dict[str, Any]:
    """What this process runs on; None where that cannot be told."""
    torch = sys.modules.get("torch")
    cpu, physical_cores = _processor()
    return {
        "cpu": cpu,
        "physical_cores": physical_cores,
        "logical_cores": os.cpu_count(),
        "affinity_cores": _affinity_cores(),
        "cgroup_cores": cgroup_cores(),
        "usable_cores": usable_cores(),
        "torch_threads": torch.get_num_threads() if torch else None,
        "torch_version": _version("torch"),
        "memory_gib": _memory_gib(),
        "load_average": _load_average(),
        "device": device,
        "device_name": (
            torch.cuda.get_device_name(device) if torch and device.startswith("cuda") else device
        ),
    }


def usable_cores() -> int:
    """Cores that affinity and the container's quota leave to this process, at least 1.

    More threads than these make every step slower.
    """
    granted = [_affinity_cores(), cgroup_cores()]
    return max(1, int(min(cores for cores in granted if cores is not None)))


def cgroup_cores(root: Path = Path("/")) -> float | None:
    """The tightest processor quota of the container, in cores; None without one.

    Args:
        root: of the file system to look in.
    """
    quotas = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            mount, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            mount, read = root / "sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        group = mount / own.strip("/")
        quotas += [read(place) for place in (group, *group.parents) if place.is_relative_to(mount)]
    return min((quota for quota in quotas if quota is not None), default=None)


def hardware_fingerprint(hardware: Mapping[str, Any]) -> str:
    """A short hash of the facts that decide speed."""
    return sha256_json({fact: hardware.get(fact) for fact in _SPEED_FACTS})[:12]


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What in two `hardware` records makes the costs of one not those of the other, in words.

    A fact that either side could not tell is no difference.
    """
    lines = [
        f"{label} {then[fact]} then, {now[fact]} now"
        for fact, label in _SPEED_FACTS.items()
        if None not in (then.get(fact), now.get(fact)) and then[fact] != now[fact]
    ]
    before, load, cores = (
        record.get(fact)
        for record, fact in ((then, "load_average"), (now, "load_average"), (now, "usable_cores"))
    )
    if before is not None and load is not None and abs(load - before) > (cores or 1):
        lines.append(f"load average {before:.1f} then, {load:.1f} now, on {cores} cores")
    return lines


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def sha256_json(value: Any) -> str:
    """Hash of a value's canonical JSON: equal for equal values, whatever the order of keys."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Hash of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def utc_now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _processor() -> tuple[str, int | None]:
    """The processor's name and its physical cores, where the system tells."""
    name, cores, socket = "", set(), ""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key == "physical id":
            socket = value
        elif key == "core id":
            cores.add((socket, value))
    return name or platform.processor() or platform.machine(), len(cores) or None


def _affinity_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota_v2(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _quota_v1(group: Path) -> float | None:
    quota = _text(group / "cpu.cfs_quota_us").strip()
    period = _text(group / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _load_average() -> float | None:
    """Over the last minute."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    """A system file's text, or nothing where there is none to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

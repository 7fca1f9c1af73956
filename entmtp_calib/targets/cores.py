"""How many CPU cores this process may really use: affinity and cgroup quota, not the host's count.

Threads beyond that number cost far more than they bring under a quota. No torch here.
"""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Whole cores granted by CPU affinity and by the cgroup (v2 or v1) quota; at least one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    quota = cgroup_quota(cgroup)
    return max(1, min(cores, int(quota)) if quota is not None else cores)


def cgroup_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs per period that the cgroup allows, None without a limit."""
    unified = _read(cgroup / "cpu.max").split()
    if len(unified) == 2:
        return None if unified[0] == "max" else int(unified[0]) / int(unified[1])
    quota = _read(cgroup / "cpu" / "cpu.cfs_quota_us")
    period = _read(cgroup / "cpu" / "cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""Usage: where a run's time went, and the most memory it had beside the size of its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entmtp_calib import files
from entmtp_calib.artifacts import MANIFEST, Effort, RunFolder
from entmtp_calib.provenance import peak_memory_bytes

LOAD = "load"
FP32 = 4  # bytes of a weight


@dataclass(frozen=True)
class Usage:
    """What a run took.

    Attributes:
        stages: by name, in their order, `load` (model, heads and prompts) first.
        peak_bytes: the most memory that a process of the run had resident at once.
        target_bytes: the target's weights in float32, for comparison.
    """

    stages: Mapping[str, Effort]
    peak_bytes: int
    target_bytes: int

    @property
    def seconds(self) -> float:
        """Of all stages, those of earlier processes too."""
        return sum(effort.seconds or 0.0 for effort in self.stages.values())

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "stages": [
                {"stage": name, "seconds": effort.seconds, "reused": effort.reused}
                for name, effort in self.stages.items()
            ],
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "target_bytes": self.target_bytes,
        }


def usage(folder: RunFolder, stages: Sequence[str], load_seconds: float, n_weights: int) -> Usage:
    """What the given stages took, as far as they are done, after a load of so many seconds."""
    efforts = {name: effort for name in stages if (effort := folder.effort(name))}
    peaks = [effort.peak_bytes or 0 for effort in efforts.values()]
    now = peak_memory_bytes()
    return Usage(
        {LOAD: Effort(load_seconds, now, reused=False), **efforts},
        max([now, *peaks]),
        FP32 * n_weights,
    )


def recorded_usage(folder: Path) -> dict[str, Any] | None:
    """What the manifest of a run folder says; None for an unfinished run, or an older one."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    found = files.read_versioned(path, {"provenance": dict})["provenance"].get("usage")
    return found if isinstance(found, dict) else None

"""The strict Pareto set, defined once.

Acceptance against nodes and throughput against nodes use the same filter. This module knows only
numbers: no trees, no units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def strict_pareto(sizes: Sequence[float], values: Sequence[float]) -> list[int]:
    """Indices of the entries whose value is above that of every entry of the same size or smaller.

    The indices come by rising size, so also by rising value. Of equal sizes only the largest value
    can stay, of full ties the first. Values that are not finite never stay.
    """
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    survivors: list[int] = []
    best = -math.inf
    for index in sorted(finite, key=lambda index: (sizes[index], -values[index], index)):
        if values[index] > best:
            survivors.append(index)
            best = values[index]
    return survivors

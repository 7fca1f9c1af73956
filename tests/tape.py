"""A CPU stand-in for CUDA graphs: operations are noted once and run again on the same memory.

As in a graph, nothing of Python runs again, results lie where they lay, and reading a tensor from
the host while recording is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Made = TypeVar("Made")
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in READS:
            raise RuntimeError("operation not permitted while recording: the host reads a tensor")
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_leaves(made)))
        return made


class Recorder:
    """Counts what it records, and plays it back."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
        self.recorded += 1
        with _Tape() as tape:
            made = work()
        # A capture computes nothing: results mean nothing before the first replay.
        for _, args, kwargs, results in tape.calls:
            given = {_memory(value) for value in tree_leaves((args, kwargs))}
            for result in results:
                if _memory(result) not in given and result.is_floating_point():
                    result.fill_(torch.nan)

        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, results in tape.calls:
                again = tree_leaves(func(*args, **kwargs))
                for result, new in zip(results, again, strict=True):
                    if _memory(result) != _memory(new):
                        result.copy_(new)

        return made, replay


def _memory(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


def broken(work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
    """A recorder that cannot."""
    raise RuntimeError("operation not permitted when stream is capturing\nand more")

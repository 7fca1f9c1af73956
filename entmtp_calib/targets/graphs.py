"""Work that is recorded once and run again without the host having a say in it.

A recorded piece of work reads and writes the same memory every time: what changes from run to run
is copied into its inputs first, and its results lie where they lay before. Keys and values
therefore lie in slots that outlive the texts which borrow them. This module knows no models.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from entmtp_calib.errors import EntmtpWarning
from entmtp_calib.targets.cache import empty_store, parted

Made = TypeVar("Made")
USUAL_ROWS = 4096
"""Texts of up to so many rows share slots of one size, so that a longer one needs no new graphs."""
WARM_UPS = 3  # before a capture, so that libraries have chosen their kernels and workspaces


class Recorder(Protocol):
    """Records work, given as a function of no arguments."""

    def __call__(self, work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
        """The tensors that the work makes, and what fills them anew from the inputs."""


class CudaGraphs:
    """Records CUDA graphs, which share one pool of memory; a `Recorder`.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
        """Raises RuntimeError for work that waits for the device, or where memory is short."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    work()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                made = work()
        return made, graph.replay


class Recordings:
    """A recorder that gives up, with one warning, the first time it fails.

    Args:
        record: what records.
        what: is recorded, for the warning.
    """

    def __init__(self, record: Recorder, what: str) -> None:
        self._record, self._what = record, what
        self.has_failed = False

    def get(
        self, known: dict[Hashable, Any], key: Hashable, build: Callable[[Recorder], Any]
    ) -> Any:
        """The recording under a key, built if need be; None after a failure."""
        if key not in known:
            built = self.attempt(lambda: build(self._record))
            if built is None:
                return None
            known[key] = built
        return known[key]

    def attempt(self, work: Callable[[], Made]) -> Made | None:
        """What the work makes; None once this or other work has failed."""
        if self.has_failed:
            return None
        try:
            # Buffers made under inference mode could not be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                return work()
        except RuntimeError as error:
            self.has_failed = True
            reason = str(error).strip().split("\n")[0]
            warnings.warn(
                EntmtpWarning(f"{self._what} runs without CUDA graphs, slower ({reason})"),
                stacklevel=2,
            )
            return None


@dataclass(frozen=True)
class Sizes:
    """The numbers of rows that keys and values are padded to: `first` doubled, plus `margin`.

    Attributes:
        first: the smallest one, without the margin.
        margin: for the rows of a step, so that a context of a power of two stays below the next.
    """

    first: int = 512
    margin: int = 128

    def holding(self, rows: int) -> int:
        """The smallest size that has room for so many rows."""
        size = self.first
        while size + self.margin < rows:
            size *= 2
        return size + self.margin

    def between(self, least: int, most: int) -> list[int]:
        """All sizes from the one that holds `least` to the one that holds `most`."""
        sizes = [self.holding(least)]
        while sizes[-1] < most:
            sizes.append(self.holding(sizes[-1] + 1))
        return sizes


@dataclass(frozen=True, eq=False)
class Slot:
    """Keys and values that stay where they are.

    Attributes:
        store: [layers, kv_heads, rows, key_dim + value_dim].
        keys, values: views of it.
        recordings: what was recorded with this memory.
    """

    store: Tensor
    keys: Tensor
    values: Tensor
    recordings: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.store.shape[2]


class Slots:
    """Lends slots; one whose borrower is gone is lent again, with its recordings."""

    def __init__(self) -> None:
        self._free: list[Slot] = []
        self._lent: weakref.WeakKeyDictionary[Any, Slot] = weakref.WeakKeyDictionary()

    def of(self, borrower: object) -> Slot | None:
        """The slot that it has borrowed, if any."""
        return self._lent.get(borrower)

    def lend(self, borrower: object, rows: int, keys: Tensor, values: Tensor) -> Slot:
        """A slot of zeros with at least so many rows, until the borrower is gone.

        Args:
            keys: [layers, kv_heads, any, head_dim], whose shape, type and device it has.
            values: likewise.
        """
        fitting = [slot for slot in self._free if slot.rows >= rows]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.rows)
            self._free.remove(slot)
            slot.store.zero_()  # a number that is not finite would spoil sums even behind a mask
        else:
            with torch.inference_mode(False):  # it is written outside of it too
                store = empty_store((*keys.shape[:2], rows), keys, values)
                slot = Slot(store, *parted(store, keys))
        self._lent[borrower] = slot
        weakref.finalize(borrower, self._free.append, slot).atexit = False
        return slot

"""Plain texts for many prompts at once: what decoding without a tree writes for each of them alone.

A prompt has its own pass; then all sequences take a step together, a row each, so that the weights
are read once for all of them. A text that ends gives its place to the next prompt. The tokens are
those of `Decoder.generate` with the empty tree where rows do not depend on their company (the lean
engine), and the same up to near-ties elsewhere.

Memory is bounded: keys and values take at most `CPU_BYTES` on a CPU, half of what is free on an
accelerator, or one sequence where that is more. Beside them there are a pass's logits and, where
texts are recorded, the hidden states of the unfinished ones: `MOST_SEQUENCES` of each at most. This
module knows no heads, no trees and no files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp_calib.acceptance import truncate
from entmtp_calib.config import SamplingConfig
from entmtp_calib.sampling import Choices, certainty
from entmtp_calib.targets.batch import BatchCache
from entmtp_calib.targets.cache import stored_rows
from entmtp_calib.targets.model import Target

CPU_BYTES = 192 * 2**20
MOST_SEQUENCES = 32
"""More rows make a pass no cheaper per row: by then the arithmetic costs more than the weights."""


@dataclass(frozen=True, eq=False)
class Rows:
    """What the target computed on the way to a text of n tokens.

    Attributes:
        hidden: [len(prompt) + n - 1, h] after the final norm; the last n rows chose the tokens.
        certainty: [n, 2] `sampling.certainty` where each was chosen: top-1 probability, entropy.
    """

    hidden: Tensor
    certainty: Tensor


@dataclass(frozen=True, eq=False)
class PlainText:
    """A finished text.

    Attributes:
        prompt: index of its prompt.
        tokens: ids up to and with the first EOS.
        rows: None unless they were asked for.
    """

    prompt: int
    tokens: list[int]
    rows: Rows | None


def plain_texts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    record: bool = False,
    on_tokens: Callable[[int], None] | None = None,
) -> Iterator[PlainText]:
    """Continue every prompt until EOS, `max_new_tokens`, or the model's last position.

    Args:
        prompts: token ids; raises `DataError` for an empty one, or one that leaves no position.
        max_new_tokens: at least 1.
        record: whether the texts come with their `Rows`.
        on_tokens: called with the number of new tokens after each pass.

    Yields:
        The texts as they end, longest prompts first.
    """
    rooms = [min(max_new_tokens, target.room(ids)) for ids in prompts]
    # A text's last token has no row of its own.
    needs = [len(ids) + room - 1 for ids, room in zip(prompts, rooms, strict=True)]
    for run in _runs(needs, target):
        jobs = [_Job(number, prompts[number], rooms[number]) for number in run.prompts]
        cache = BatchCache(target.n_layers, run.capacity, run.places)
        yield from _Batch(target, cache, jobs, sampling, record, on_tokens).texts()


@dataclass(frozen=True)
class _Run:
    """Prompts that share a cache, longest first."""

    prompts: list[int]
    capacity: int
    places: int


def _runs(needs: Sequence[int], target: Target) -> Iterator[_Run]:
    """All prompts, longest first, so that too little memory shows at once.

    Those that need less than half the rows have a run of their own, unless there is a place for
    everybody: short texts then do not wait for the room that long ones keep.
    """
    left = sorted(range(len(needs)), key=lambda number: -needs[number])
    while left:
        capacity = needs[left[0]]
        room = _bytes(target.device) // (stored_rows(capacity) * target.row_bytes)
        places = min(max(room, 1), MOST_SEQUENCES, len(left))
        own = left
        if places < len(left):
            own = [number for number in left if 2 * needs[number] > capacity]
        yield _Run(own, capacity, min(places, len(own)))
        left = left[len(own) :]


def _bytes(device: torch.device) -> int:
    """What keys and values may take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return CPU_BYTES


@dataclass(frozen=True)
class _Job:
    """A prompt that waits, and the tokens its text may have."""

    number: int
    prompt_ids: Sequence[int]
    room: int


class _Batch:
    """Sequences being written, one in each place of a cache."""

    def __init__(
        self,
        target: Target,
        cache: BatchCache,
        jobs: Sequence[_Job],
        sampling: SamplingConfig | None,
        record: bool,
        on_tokens: Callable[[int], None] | None,
    ) -> None:
        self._target, self._cache, self._waiting = target, cache, deque(jobs)
        self._sampling, self._record = sampling or SamplingConfig(), record
        self._on_tokens = on_tokens or (lambda count: None)

    def texts(self) -> Iterator[PlainText]:
        """All texts, as they end."""
        writing = [self._join(place) for place in range(self._cache.n_sequences)]
        while writing:
            for place, text in enumerate(writing):
                while text is not None and text.is_over:
                    yield text.finished()
                    text = writing[place] = self._join(place)
            going = self._close_up(writing)
            if going:
                self._step(going)
            writing = [*going]

    def _join(self, place: int) -> _Writing | None:
        """The next prompt's pass and first token, in a place; None where nobody waits."""
        if not self._waiting:
            return None
        job = self._waiting.popleft()
        n = len(job.prompt_ids)
        cache = self._cache.of(place)
        cache.reset()
        ids = torch.tensor(job.prompt_ids, dtype=torch.long)
        hidden = self._target.forward(ids, torch.arange(n), cache)
        cache.commit(range(n))
        text = _Writing(job, self._target.eos_ids, self._record)
        self._choose([text], [hidden], self._target.logits(hidden[-1:]), [n])
        return text

    def _close_up(self, writing: Sequence[_Writing | None]) -> list[_Writing]:
        """The texts that go on; the last ones move into the places that are left."""
        going = [place for place, text in enumerate(writing) if text is not None]
        last = [place for place in going if place >= len(going)]
        order = [place if writing[place] else last.pop() for place in range(len(going))]
        self._cache.keep(order)
        return [text for place in order if (text := writing[place])]

    def _step(self, writing: list[_Writing]) -> None:
        """Feed every sequence its last token and choose the next."""
        ids = [text.tokens[-1] for text in writing]
        hidden = self._target.forward_batch(ids, self._cache.lengths, self._cache)
        self._cache.commit()
        logits = self._target.logits(hidden)
        self._choose(writing, hidden.split(1), logits, list(self._cache.lengths))

    def _choose(
        self,
        writing: Sequence[_Writing],
        hidden: Sequence[Tensor],
        logits: Tensor,
        positions: Sequence[int],
    ) -> None:
        """Each text's next token, from its row of logits [B, V], for absolute positions [B]."""
        choices = Choices(logits, positions, self._sampling)
        for row, text in enumerate(writing):
            text.take(choices[row], hidden[row], logits[row])
        self._on_tokens(len(writing))


class _Writing:
    """A text being written."""

    def __init__(self, job: _Job, eos_ids: frozenset[int], record: bool) -> None:
        self._job, self._eos_ids, self._record = job, eos_ids, record
        self.tokens: list[int] = []
        self.is_over = False
        self._hidden: list[Tensor] = []
        self._certainty: list[Tensor] = []

    def take(self, token: int, hidden: Tensor, logits: Tensor) -> None:
        """One more token, the rows [m, h] passed before it, and the logits [V] that chose it."""
        left = self._job.room - len(self.tokens)
        self.tokens.append(token)
        self.is_over = truncate([token], self._eos_ids, left)[1] is not None
        if self._record:
            self._hidden.append(hidden)
            self._certainty.append(torch.stack(certainty(logits)))

    def finished(self) -> PlainText:
        """The whole text."""
        rows = None
        if self._record:
            rows = Rows(torch.cat(self._hidden), torch.stack(self._certainty))
        return PlainText(self._job.number, self.tokens, rows)

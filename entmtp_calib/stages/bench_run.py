"""The timed run of a bench: methods in random order on one prompt after the other.

Plain decoding writes each prompt's text once, untimed: that says how long the text is for every
method, and what it must be. Then all methods are timed, plain decoding too, in an order drawn anew
for each prompt and round. A method that raises is out, and spoils no other's figures. Finished
prompts are kept, so that an interrupted run goes on behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from entmtp_calib.artifacts import RunFolder
from entmtp_calib.config import BenchConfig
from entmtp_calib.decoding import WARM_UP_TOKENS
from entmtp_calib.progress import Progress
from entmtp_calib.stages.bench_figures import PLAIN, Written, run_row
from entmtp_calib.stages.bench_methods import Method
from entmtp_calib.stages.run_prompts import Encoded
from entmtp_calib.targets.network import first_line
from entmtp_calib.timing import Clock, interleave

STAGE = "bench"


Score = Callable[[Sequence[int], Sequence[int]], float]
"""(prompt ids, text) -> nats per token of the text under the target."""


class Runner:
    """Times the methods on one prompt after the other; knows which of them have failed.

    With a score, each text is scored too, outside of its time: for texts that are not plain's.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        config: BenchConfig,
        clock: Clock,
        progress: Progress,
        score: Score | None = None,
    ) -> None:
        self.methods, self.config, self.clock, self.score = methods, config, clock, score
        self.progress = progress
        self.errors: dict[str, str] = {}

    def run(
        self, folder: RunFolder, inputs: Any, prompts: Sequence[Encoded]
    ) -> list[dict[str, Any]]:
        """The rows of all timed texts, those of an interrupted run among them."""
        parts = folder.partial(STAGE, inputs)
        known = parts.values()
        per_prompt = self.config.rounds * len(self.methods)
        for number in known:
            self.errors |= parts.read_json(number)["errors"]
        if len(known) < len(prompts):
            self._warm_up(prompts[0].ids)
        self.progress.start(STAGE, len(prompts) * per_prompt)
        runs: list[dict[str, Any]] = []
        for number, prompt in enumerate(prompts):
            if number in known:
                self.progress.advance(per_prompt)
            else:
                timed = self._time(number, prompt)
                parts.write_json(number, {"runs": timed, "errors": self.errors})
            runs += parts.read_json(number)["runs"]
        self.progress.done()
        return runs

    def _warm_up(self, ids: Sequence[int]) -> None:
        """So that no timed text pays for a first time."""
        self.progress.start("warming up", len(self.methods))
        for name in self.methods:
            self._attempt(name, ids, WARM_UP_TOKENS)
            self.progress.advance(1, name)
        self.progress.done()

    def _time(self, number: int, prompt: Encoded) -> list[dict[str, Any]]:
        reference = self.methods[PLAIN].generate(prompt.ids, self.config.max_new_tokens).tokens
        order = interleave(list(self.methods), self.config.rounds, self.config.seed + number)
        rows = []
        for round_number, name in order:
            started = self.clock.now()
            written = self._attempt(name, prompt.ids, len(reference))
            seconds = self.clock.now() - started
            if written:
                row = run_row(name, prompt.id, round_number, written, seconds, reference)
                if self.score:
                    row["nll"] = self.score(prompt.ids, written.tokens)
                rows.append(row)
            self.progress.advance(1, name)
        return rows

    def _attempt(self, name: str, ids: Sequence[int], n_tokens: int) -> Written | None:
        """The method's text; None once it has failed."""
        if name in self.errors:
            return None
        try:
            return self.methods[name].generate(ids, n_tokens)
        # Whatever one method raises (an unsupported family, memory, a bug) must not cost the
        # figures of the others; it is shown in its row. Without plain decoding there is no bench.
        except Exception as error:
            if name == PLAIN:
                raise
            self.errors[name] = _named(error)
            return None


def _named(error: Exception) -> str:
    """Its type and the first line of what it says."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"

"""From timed texts to the figures of a bench: a row per text, a row per method.

Figures are totals over totals, so rounds and prompts add up; intervals come from whole prompts, and
speed-ups compare the same prompts. It does not know how a text is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entmtp_calib.decoding import Generation
from entmtp_calib.timing import Interval, mean_interval, paired_bootstrap

PLAIN = "plain"
BASELINES = {
    "ratio_to_plain": PLAIN,
    "ratio_to_hydra_default": "hydra-default",
    "ratio_to_static": "static",
}
"""Column -> the method whose tokens per second stand below the line."""

Runs = Sequence[Mapping[str, Any]]
"""Rows of `bench_runs.parquet`."""


@dataclass(frozen=True)
class Written:
    """A text, and what it took.

    Attributes:
        tokens: the generated ids.
        steps: emissions; plain decoding has one per token.
        passes: of the target, the prompt's own left out.
        switches: changes of the tree from one pass to the next; None where there are no trees.
        prefill_seconds: until the prompt's pass has given its token.
        decode_seconds: all that comes after it.
    """

    tokens: list[int]
    steps: int
    passes: int
    switches: int | None
    prefill_seconds: float
    decode_seconds: float

    @classmethod
    def of(cls, generation: Generation) -> Written:
        """Of a generation of our own loop."""
        return cls(
            tokens=generation.tokens,
            steps=len(generation.steps),
            passes=len(generation.chosen),
            switches=generation.switches,
            prefill_seconds=generation.prefill_seconds,
            decode_seconds=generation.decode_seconds,
        )


def run_row(
    method: str,
    prompt: str,
    round_number: int,
    written: Written,
    seconds: float,
    reference: Sequence[int],
) -> dict[str, Any]:
    """A row of `bench_runs.parquet`.

    Args:
        method: its name.
        prompt: its id.
        round_number: which repeat, from 0.
        written: the text.
        seconds: end to end, taken around the whole generation, for every method alike.
        reference: plain decoding's text.
    """
    return {
        "method": method,
        "prompt": prompt,
        "round": round_number,
        "tokens": len(written.tokens),
        "steps": written.steps,
        "passes": written.passes,
        "switches": written.switches,
        "seconds": seconds,
        "prefill_seconds": written.prefill_seconds,
        "decode_seconds": written.decode_seconds,
        "same": list(written.tokens) == list(reference),
    }


def method_rows(
    methods: Mapping[str, bool], runs: Runs, errors: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The rows of `bench.parquet`.

    Args:
        methods: in the order of the table; whether each claims to write plain decoding's text.
        runs: all timed texts, plain's among them, prompts in one order.
        errors: why a method failed; its figures are left out, since they would not be paired.
    """
    texts = {name: [run for run in runs if run["method"] == name] for name in methods}
    whole = {name: mine for name, mine in texts.items() if name not in errors}
    return [
        {
            "method": name,
            "claims_lossless": lossless,
            "texts": len(texts[name]),
            "tokens_compared": _total(texts[name], "tokens"),
            "divergences": sum(not run["same"] for run in texts[name]),
            "error": errors.get(name),
            **(
                _figures(whole[name]) | _ratios(name, whole) | _likelihood(name, whole)
                if name in whole
                else {}
            ),
        }
        for name, lossless in methods.items()
    ]


def _figures(mine: Runs) -> dict[str, Any]:
    tokens, steps, passes = (_total(mine, key) for key in ("tokens", "steps", "passes"))
    decode_seconds = _total(mine, "decode_seconds")
    counts = [run["switches"] for run in mine]
    rate = mean_interval(*_counts(mine))
    return {
        "tokens": tokens,
        "seconds": _total(mine, "seconds"),
        "prefill_seconds": _total(mine, "prefill_seconds"),
        "decode_seconds": decode_seconds,
        **_bounded("tokens_per_second", rate),
        "decode_tokens_per_second": tokens / decode_seconds if decode_seconds else None,
        "steps": steps,
        "passes": passes,
        "mean_emitted_tokens": tokens / steps,
        "mean_accepted_draft_tokens": (tokens - steps) / steps,
        "step_ms": 1000 * decode_seconds / passes if passes else None,
        "switches": None if None in counts else sum(counts),
    }


def _ratios(name: str, whole: Mapping[str, Runs]) -> dict[str, Any]:
    """Speed-ups over the baselines that took part and did not fail."""
    ratios: dict[str, Any] = {}
    for column, baseline in BASELINES.items():
        if baseline in whole:
            mine, theirs = _counts(whole[name]), _counts(whole[baseline])
            ratios |= _bounded(column, paired_bootstrap(*mine, *theirs))
    return ratios


def _likelihood(name: str, whole: Mapping[str, Runs]) -> dict[str, Any]:
    """Nats per token under the target, and how many more than plain decoding's texts have."""
    mine, plain = whole[name], whole[PLAIN]
    if any(run.get("nll") is None for run in (*mine, *plain)):
        return {}
    nats = _nats(mine)
    return {"nll": nats, "nll_difference": nats - _nats(plain)}


def _nats(runs: Runs) -> float:
    return float(sum(run["nll"] * run["tokens"] for run in runs) / _total(runs, "tokens"))


def _counts(runs: Runs) -> tuple[list[float], list[float]]:
    return _by_prompt(runs, "tokens"), _by_prompt(runs, "seconds")


def _bounded(column: str, figure: Interval) -> dict[str, float]:
    return {column: figure.value, f"{column}_low": figure.low, f"{column}_high": figure.high}


def _total(runs: Runs, key: str) -> Any:
    return sum(run[key] for run in runs)


def _by_prompt(runs: Runs, key: str) -> list[float]:
    """[P], the rounds of a prompt added up."""
    sums: dict[str, float] = {}
    for run in runs:
        sums[run["prompt"]] = sums.get(run["prompt"], 0) + run[key]
    return list(sums.values())

"""Schedule: the policies for some trees under some costs, and what replay says of them.

Needs a trace and a cost table, and neither a model nor a clock: a trace taken once can be combined
with the costs of another machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entmtp_calib.costs import Costs
from entmtp_calib.errors import UsageError
from entmtp_calib.fitting import (
    Fit,
    fit_hysteresis,
    fit_ladder,
    fit_staged,
    fit_static,
    search_ladder,
    search_staged,
    shortlist,
)
from entmtp_calib.policy import Policy, Staged, Static
from entmtp_calib.progress import Progress, Silent
from entmtp_calib.replay import oracle_ms
from entmtp_calib.signals import SignalSpec
from entmtp_calib.task import Task
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, Tree

AUTO = "auto"
STATIC, LADDER, HYSTERESIS, STAGED = "static", "ladder", "hysteresis", "staged"
HYSTERESIS_SIGNALS = 2  # signals, the best of the ladder's, that are worth a search over pairs
NEAR = 0.002  # gains that differ less are equal
SIGNALS = (
    SignalSpec("chain_value", 1),
    SignalSpec("chain_value", 2),
    SignalSpec("expected_accepted", 2),
    SignalSpec("path_value", 1),
    SignalSpec("chain_value", 1, running=True),
    SignalSpec("entropy"),
    SignalSpec("base_top1"),
    SignalSpec("acceptance_average"),
)


@dataclass(frozen=True)
class Schedule:
    """Fitted policies.

    Attributes:
        trees: what their indices count, smallest first: those worth a scheduler's while.
        fits: by name.
        auto: the name of the policy to use: the simplest one that no other beats.
        notes: a line on how each was found.
    """

    trees: tuple[Tree, ...]
    fits: dict[str, Fit]
    auto: str
    notes: tuple[str, ...]


def fit_schedule(
    trace: Trace,
    trees: Sequence[Tree],
    costs: Costs,
    signal: str = AUTO,
    progress: Progress | None = None,
) -> Schedule:
    """Fit every kind of policy.

    Args:
        trace: of the texts to fit on.
        trees: candidates; the empty tree is one of them in any case.
        costs: of the machine.
        signal: the one signal of ladder and hysteresis, or "auto": the one that gains most on texts
            not fitted on.
    """
    signals = signals_to_try(signal, trace.max_depth)
    progress = progress or Silent()
    progress.start("fitting policies", len(signals) + HYSTERESIS_SIGNALS + 1)
    task = Task.of(trace, usable([EMPTY, *trees], costs), costs)
    task = task.among(shortlist(task))

    def fitted(fit: Fit) -> Fit:
        progress.advance(1, f"{fit.policy.name} {100 * fit.held_out_gain:+.1f} %")
        return fit

    ladders = {spec: fitted(fit_ladder(task, spec)) for spec in signals}
    promising = sorted(ladders, key=lambda spec: _promise(ladders[spec]), reverse=True)
    pairs = [fitted(fit_hysteresis(task, spec)) for spec in promising[:HYSTERESIS_SIGNALS]]
    fits = {
        STATIC: fit_static(task),
        LADDER: ladders[promising[0]],
        HYSTERESIS: max(pairs, key=_promise),
        STAGED: fitted(fit_staged(task)),
    }
    progress.done()
    auto = _simplest_best(fits)
    notes = [f"{name}: {explain(fit)}" for name, fit in fits.items() if name != STATIC]
    return Schedule(task.trees, fits, auto, (*notes, _auto_note(auto)))


def usable(trees: Sequence[Tree], costs: Costs) -> list[Tree]:
    """The trees whose steps the costs reach, each once, smallest first."""
    priced = {tree for tree in trees if costs.step_ms([tree])[0] < float("inf")}
    return sorted(priced, key=lambda tree: (tree.n_nodes, tree.depth, tree.paths))


def predict(
    task: Task,
    policies: Mapping[str, Policy],
    oracle: Task,
    signal: str = AUTO,
    bounds: Mapping[str, float] | None = None,
) -> dict[str, dict[str, Any]]:
    """What replay says of policies on some texts.

    Args:
        task: the texts, the trees that the policies count, and the costs.
        policies: by name.
        oracle: the same texts and costs with all trees that any scheduler could have used.
        signal: as for `fit_schedule`, for the bounds.
        bounds: of `feature_bounds`, where they are known.

    Returns:
        Per policy: tokens per second of the steps alone; the oracle's tokens per second and the
        share of its gain that the policy captures; and, as an upper bound, the rate of the policy's
        kind when fitted to the very texts it is scored on.
    """
    n = len(task.trace)
    static_ms = task.ms(policies.get(STATIC, Static(task.best_static))).sum()
    best_ms = float(oracle_ms(oracle.trace, oracle.accepted, oracle.step_ms).sum())
    bounds = feature_bounds(oracle, signal) if bounds is None else bounds
    predicted = {}
    for name, policy in policies.items():
        mine_ms = float(task.ms(policy).sum())
        possible = n / best_ms - n / static_ms
        # A search may miss what was found on other texts.
        bound = max(bounds[policy.name], 1000 * n / mine_ms)
        predicted[name] = {
            "tokens_per_second_predicted": 1000 * n / mine_ms,
            "oracle_tokens_per_second": 1000 * n / best_ms,
            "feature_bound_tokens_per_second": bound,
            "capture": (n / mine_ms - n / static_ms) / possible if possible > 0 else None,
        }
    return predicted


def explain(fit: Fit) -> str:
    """How a fit came out, in a line."""
    gain = f"{100 * fit.held_out_gain:+.1f} %"
    if fit.is_static:
        return f"the best static tree; no gain is sure on texts not fitted on ({gain})"
    policy = fit.policy
    what = "after each level" if isinstance(policy, Staged) else str(policy.signals[0])
    return f"{what}, {gain} over the best static tree on texts not fitted on"


def feature_bounds(task: Task, signal: str = AUTO) -> dict[str, float]:
    """Tokens per second of each kind of policy fitted to the texts it is scored on."""
    few = task.among(shortlist(task))
    static = few.tokens_per_second(Static(few.best_static))
    signals = signals_to_try(signal, task.trace.max_depth)
    ladder = max(few.tokens_per_second(search_ladder(few, spec)) for spec in signals)
    staged = few.tokens_per_second(search_staged(few))
    return {
        Static.name: static,
        LADDER: max(static, ladder),
        HYSTERESIS: max(static, ladder),
        STAGED: max(static, staged),
    }


def signals_to_try(signal: str, depth: int | None) -> list[SignalSpec]:
    """The signals of ladder and hysteresis.

    Args:
        signal: one of them as `SignalSpec.parse` reads it, or "auto".
        depth: of the heads; None where it is not known yet.

    Raises:
        UsageError: there is no such signal, or it needs more heads.
    """
    if signal == AUTO:
        return [spec for spec in SIGNALS if depth is None or spec.depth <= depth]
    try:
        spec = SignalSpec.parse(signal)
    except ValueError as error:
        raise UsageError(f"--signal {signal}: {error}", "auto, or such as chain_value:1") from None
    if depth is not None and spec.depth > depth:
        raise UsageError(f"--signal {signal}", f"a depth of at most {depth}, that of the heads")
    return [spec]


def _promise(fit: Fit) -> tuple[bool, float]:
    """For sorting: a gain that is sure stands above a larger one that is not."""
    return not fit.is_static, fit.held_out_gain


def _simplest_best(fits: Mapping[str, Fit]) -> str:
    """The policy that gains most on unseen texts; of near equals the first, which is simpler."""
    best = STATIC
    for name, fit in fits.items():
        if not fit.is_static and fit.held_out_gain > fits[best].held_out_gain + NEAR:
            best = name
    return best


def _auto_note(auto: str) -> str:
    if auto == STATIC:
        return "auto: no policy surely gains over the best static tree, so auto is static"
    return f"auto: {auto}"

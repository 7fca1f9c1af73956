"""Walks: the exact steps that any policy takes on a recorded trace, and their time.

As in `replay`, the last row of a prompt is a terminal step, at which no policy is asked. This
module knows no models, no clocks and no files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from entmtp_calib import signals
from entmtp_calib.decisions import chosen_by_cell, decide, decided
from entmtp_calib.policy import Policy
from entmtp_calib.signals import Memory, SignalSpec
from entmtp_calib.trace import Bools, Floats, Ints, Trace

NOT_CHOSEN = -1  # the policy was not asked at this row


@dataclass(frozen=True, eq=False)
class PolicyWalk:
    """The steps of a policy on a trace.

    Attributes:
        visited: bool [N], rows where a step starts.
        chosen: int64 [N], the tree of the step; -1 where no tree was chosen (terminal, unvisited).
        accepted: int64 [N], accepted draft tokens of the step; 0 where no tree was chosen.
        values: float64 [N], the signal that the policy read last; NaN where it read none.
        levels: int64 [N], levels of the greedy chain drafted for what it read.
    """

    visited: Bools
    chosen: Ints
    accepted: Ints
    values: Floats
    levels: Ints

    def switches(self, trace: Trace) -> int:
        """Steps that used another tree than the step before them in the same text."""
        asked = np.flatnonzero(self.chosen != NOT_CHOSEN)
        same_text = trace.prompt[asked][1:] == trace.prompt[asked][:-1]
        return int((same_text & (np.diff(self.chosen[asked]) != 0)).sum())

    def steps_per_tree(self, n_trees: int) -> Ints:
        """[K], the steps each tree was chosen for."""
        return np.bincount(self.chosen[self.chosen != NOT_CHOSEN], minlength=n_trees)


def signal_values(trace: Trace, spec: SignalSpec) -> Floats:
    """[N], the signal at each position; not for the acceptance average, which has a history."""
    return signals.signal_values(spec, trace.base_top1, trace.entropy, trace.chain_probs)


def walk_policy(
    trace: Trace, accepted: Ints, policy: Policy, speculates: Bools | None = None
) -> PolicyWalk:
    """The steps of a policy: its own `choose`, its own state for each text.

    Args:
        accepted: int64 [K, N], accepted draft tokens of each tree at each row.
        speculates: bool [K], which trees have nodes; all of them where not given. Only the
            acceptance average depends on it.
    """
    if any(spec.is_average or spec.running for spec in policy.signals):
        drafts = [True] * len(accepted) if speculates is None else speculates.tolist()
        steps = _remembering(trace, accepted, policy, drafts)
    else:
        steps = _forgetting(trace, accepted, policy)
    return _spread(trace, accepted, *steps)


Steps = tuple[Ints, Ints, Ints, Floats]
"""Per step that is not terminal: its row, the tree chosen, levels drafted, the value read last."""


def _forgetting(trace: Trace, accepted: Ints, policy: Policy) -> Steps:
    """Where row and state alone decide, every row is decided beforehand.

    States that decide alike are one kind. A place is a row in a kind of state, numbered kind by
    kind, and leads to one other; the steps are the places on the way from the first.
    """
    n_rows, start = len(trace), policy.start()
    decisions = {state: decide(policy, state) for state in {start, *policy.indices}}
    kinds = list(dict.fromkeys(decisions.values()))
    kind_of = np.zeros(len(accepted), dtype=np.int64)
    kind_of[list(decisions)] = [kinds.index(decision) for decision in decisions.values()]
    values = {spec: signal_values(trace, spec) for spec in policy.signals}
    tables = [decided(kind, values, n_rows) for kind in kinds]
    chosen, levels, last = (np.concatenate(column) for column in zip(*tables, strict=True))
    rows, remaining = np.tile((np.arange(n_rows), trace.remaining), len(kinds))
    emitted = accepted[chosen, rows] + 1
    # A text's last token takes no step; the next text starts afresh.
    first = int(kind_of[start]) * n_rows
    inside, next_text = kind_of[chosen] * n_rows + rows + emitted, first + rows + remaining
    leads_to = np.where(remaining - emitted > 1, inside, next_text).tolist()
    place, places = first, []
    while place != first + n_rows:  # past the last text: no way leads to another kind's row 0
        places.append(place)
        place = leads_to[place]
    at = np.array(places, dtype=np.int64)
    at = at[remaining[at] > 1]
    return rows[at], chosen[at], levels[at], last[at]


def _remembering(trace: Trace, accepted: Ints, policy: Policy, drafts: Sequence[bool]) -> Steps:
    """Where the one signal depends on the steps before, they are taken one after the other."""
    (spec,) = policy.signals
    after = {state: chosen_by_cell(policy, state) for state in policy.indices}
    thresholds = policy.cuts[spec]
    counts = {index: accepted[index].tolist() for index in policy.indices}
    fresh = None if spec.is_average else signal_values(trace, spec).tolist()
    rows, chosen, last = [], [], []
    for row, end in zip(trace.starts.tolist(), (trace.ends - 1).tolist(), strict=True):
        state, memory = policy.start(), Memory()
        while row < end:
            value = memory.value(spec, fresh[row]) if fresh else memory.average
            state = after[state][bisect_left(thresholds, value)]
            rows.append(row)
            chosen.append(state)
            last.append(value)
            count = counts[state][row]
            memory.observe(count, drafts[state])
            row += count + 1
    at, index = np.array(rows, dtype=np.int64), np.array(chosen, dtype=np.int64)
    return at, index, np.full(len(at), spec.depth), np.array(last, dtype=np.float64)


def _spread(
    trace: Trace, accepted: Ints, at: Ints, chosen: Ints, levels: Ints, last: Floats
) -> PolicyWalk:
    """Spread the steps over all N rows and add the terminal ones, which end what is left over."""
    n_rows = len(trace)
    walked = PolicyWalk(
        visited=np.zeros(n_rows, dtype=np.bool_),
        chosen=np.full(n_rows, NOT_CHOSEN, dtype=np.int64),
        accepted=np.zeros(n_rows, dtype=np.int64),
        values=np.full(n_rows, np.nan),
        levels=np.zeros(n_rows, dtype=np.int64),
    )
    walked.visited[at] = True
    walked.chosen[at] = chosen
    walked.accepted[at] = accepted[chosen, at]
    walked.values[at], walked.levels[at] = last, levels
    emitted = np.add.reduceat(walked.visited + walked.accepted, trace.starts)
    walked.visited[trace.ends - 1] |= emitted < trace.lengths
    return walked


def prompt_ms(trace: Trace, steps: PolicyWalk, ms: Floats) -> Floats:
    """[P], the time of each text's steps; terminal steps cost nothing.

    Args:
        steps: of a policy on this trace.
        ms: float64 [L + 1, K], see `Costs.policy_ms`.
    """
    asked = steps.chosen != NOT_CHOSEN
    each = np.zeros(len(trace))
    each[asked] = ms[steps.levels[asked], steps.chosen[asked]]
    return np.add.reduceat(each, trace.starts)

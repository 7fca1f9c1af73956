"""Export: a bank's tree, or the bank, in the form that another engine reads.

What a form cannot express is said; where the closest thing to a tree has to be found, it is fitted
by replay on the search and select splits, and its loss is stated on the report split, which chose
nothing. Needs no model, and no torch but to write a grow map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entmtp_calib.errors import DataError
from entmtp_calib.formats import growmap
from entmtp_calib.formats.chains import (
    AdaptiveRule,
    adaptive_file,
    schedule_config,
    synthetic_config,
)
from entmtp_calib.formats.engines import Form, form_named
from entmtp_calib.formats.fit import (
    Fit,
    adaptive,
    best_chain,
    closest_numbers,
    schedule,
)
from entmtp_calib.formats.lists import (
    eagle_config,
    leaf_flag,
    node_list,
    node_yaml,
    rank_gaps,
    skipped_siblings,
    token_tree,
    uneven_level,
)
from entmtp_calib.formats.profile import Profile, speculation_profile
from entmtp_calib.stages.export_subject import JUDGED_ON, Subject
from entmtp_calib.tree import chain


@dataclass(frozen=True)
class Exported:
    """A file for another engine.

    Attributes:
        form: which.
        content: the file's bytes.
        notes: who reads it, what it cannot express and what that costs, a line each.
    """

    form: Form
    content: bytes
    notes: tuple[str, ...]


def export(path: Path, form: str, tree: str | None = None, costs: Path | None = None) -> Exported:
    """Write a bank's tree, or the bank, in a form.

    Args:
        path: the bank's run folder or file.
        form: its name, see `formats.engines.FORMS`.
        tree: id or number of the tree; None for the best fixed one, or, where the form is made from
            a whole bank, all.
        costs: another machine's cost table; None for the run's own.

    Raises:
        UsageError: there is no such form.
        TreeError: there is no such tree, or the form cannot express it.
        ArtifactError: a file is missing, or is not what it should be.
    """
    subject = Subject.of(path, form_named(form), tree, costs)
    content, notes = _WRITERS[form](subject)
    said = (*subject.notes, *notes)
    if form == "trtllm-bench":
        content = node_yaml(subject.tree, said)
    data = content if isinstance(content, bytes) else content.encode()
    return Exported(subject.form, data, said)


Written = tuple[str | bytes, Sequence[str]]


def _medusa(subject: Subject) -> Written:
    skipped = skipped_siblings(subject.tree)
    note = "Medusa reads it right; Hydra drafts wrong tokens under {}, which has children while a "
    note += "sibling before it has none"
    return node_list(subject.tree), [note.format(list(path)) for path in skipped[:1]]


def _trtllm(subject: Subject) -> Written:
    gaps = [path for path in rank_gaps(subject.tree) if len(path) == 1]
    notes = [f"TensorRT-LLM drafts every rank up to {gaps[-1][0]} at depth 1"] if gaps else []
    notes += [
        "lists the leaves, their prefixes are implied",
        f"its LLM API, in 1.3.0rc27 and not in 1.4.0rc1: {eagle_config(subject.tree)}",
    ]
    return leaf_flag(subject.tree), notes


def _trtllm_bench(subject: Subject) -> Written:
    return b"", ["run with trtllm-bench latency --medusa_choices FILE"]  # the notes stand in it


def _vllm_tree(subject: Subject) -> Written:
    depth = uneven_level(subject.tree)
    notes = ["goes into --speculative-config beside method and model"]
    if depth is not None:
        notes.append(
            f"not all nodes above depth {depth} have as many children: vLLM drafts other nodes "
            "than these"
        )
    return token_tree(subject.tree) + "\n", notes


def _vllm_schedule(subject: Subject) -> Written:
    ranges = schedule(subject.fitted_on, subject.costs, subject.depth)
    if not any(depth for _, _, depth in ranges):
        raise DataError(
            f"no chain to depth {subject.depth} pays at any batch size from 1 to {ranges[-1][1]}",
            action="serve without speculation",
        )
    first = ranges[0][2]
    notes = [subject.loss(f"at batch size 1 {chain(first).id}", subject.figures(chain(first)))]
    notes.append(
        f"B texts are taken to cost what one pass of all their rows does; beyond {ranges[-1][1]} "
        "the costs do not reach, and vLLM keeps the last depth"
    )
    if first:
        marginal = Profile.of(subject.judged_on, chain(first)).marginal
        notes.append(f"for load tests without drafting: {synthetic_config(marginal)}")
    return schedule_config(ranges), notes


def _sglang(subject: Subject) -> Written:
    fit = closest_numbers(subject.tree, subject.fitted_on, subject.costs)
    return fit.numbers.flags() + "\n", _fit_notes(subject, "closest fit", fit)


def _fit_notes(subject: Subject, what: str, fit: Fit) -> list[str]:
    notes = [subject.loss(what, fit.on(subject.judged_on))]
    if fit.numbers.topk > 1:
        notes.append(
            f"replayed with {fit.tree.n_nodes} fixed nodes of the tree; the engine chooses as many "
            "anew each step, by its drafter's confidence: entmtp bench measures that rule (eagle2)"
        )
    return notes


def _sglang_adaptive(subject: Subject) -> Written:
    steps = sorted({tree.depth for tree in subject.trees} - {0})
    first = best_chain(subject.fitted_on, subject.costs, steps)
    rule = AdaptiveRule()
    figures = adaptive(subject.judged_on, subject.costs, steps, first, rule)
    flags = (
        f"--speculative-adaptive --speculative-eagle-topk 1 --speculative-num-steps {first} "
        f"--speculative-num-draft-tokens {first + 1}"
    )
    notes = [
        f"start with {flags} --speculative-adaptive-config FILE",
        subject.loss(f"chains of depth {', '.join(map(str, steps))} at batch size 1", figures),
    ]
    return adaptive_file(steps, rule), notes


def _eagle(subject: Subject) -> Written:
    notes: list[str] = []
    if subject.recorded:
        fit = closest_numbers(subject.tree, subject.fitted_on, subject.costs)
        numbers = ", ".join(f"{name}={value}" for name, value in fit.numbers.eagle.items())
        notes = _fit_notes(subject, f"EAGLE-2 and 3: {numbers}", fit)
    return node_list(subject.tree), notes


def _sequoia(subject: Subject) -> Written:
    return growmap.write(subject.tree), ["the root is node 0 and counts"]


def _modelopt(subject: Subject) -> Written:
    profile = Profile.of(subject.judged_on, subject.tree)
    known, bank = subject.run.conditions(JUDGED_ON), subject.bank
    conditions: dict[str, Any] = {
        "dataset": known["data"],
        "split": JUDGED_ON,
        "num_samples": known["prompts"],
        "passes": profile.passes,
        "sampling": known["sampling"],
        "tree": subject.tree.id,
        "tree_choices": subject.tree.to_list(),
    }
    document = speculation_profile(
        profile,
        method=str(bank.heads.get("kind", "")),
        target=str(bank.model.get("name", "")),
        draft=str(bank.heads.get("name", "")),
        conditions=conditions,
    )
    return document, ["per target pass: a text's last token, which needs none, is left out"]


_WRITERS: dict[str, Callable[[Subject], Written]] = {
    "medusa": _medusa,
    "trtllm": _trtllm,
    "trtllm-bench": _trtllm_bench,
    "vllm-tree": _vllm_tree,
    "vllm-schedule": _vllm_schedule,
    "sglang": _sglang,
    "sglang-adaptive": _sglang_adaptive,
    "eagle": _eagle,
    "sequoia": _sequoia,
    "modelopt": _modelopt,
}

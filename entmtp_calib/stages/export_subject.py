"""What is exported: the tree or trees of a bank, and what its run says of them by replay.

This module knows no engine's syntax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from entmtp_calib.artifacts import RUN
from entmtp_calib.bank import Bank
from entmtp_calib.costs import Costs
from entmtp_calib.errors import ArtifactError, TreeError
from entmtp_calib.formats.engines import Form
from entmtp_calib.formats.fit import Figures, fixed
from entmtp_calib.stages.recorded import TIMING, Recorded
from entmtp_calib.stages.schedule import STATIC
from entmtp_calib.stages.simulate import FITTED_ON
from entmtp_calib.trace import Trace
from entmtp_calib.tree import Tree

JUDGED_ON = "report"  # chose nothing


@dataclass(frozen=True)
class Subject:
    """What is exported, and what its run says of it.

    Attributes:
        path: the bank's run folder or file, as it was named.
        form: what it is written in.
        bank: the bank.
        recorded: its run; None for a bank file that stands alone.
        tree: the tree, or what a whole bank's chains are compared with: the best fixed tree.
        trees: the tree alone, or all of the bank.
        costs_file: another machine's cost table; None for the run's own.
    """

    path: Path
    form: Form
    bank: Bank
    recorded: Recorded | None
    tree: Tree
    trees: tuple[Tree, ...]
    costs_file: Path | None

    @classmethod
    def of(cls, path: Path, form: Form, name: str | None, costs: Path | None) -> Subject:
        """A bank's tree of this id or number; without a name the best fixed one, or all trees."""
        folder = path.parent if path.is_file() else path
        recorded = Recorded.open(path) if (folder / RUN).is_file() else None
        bank = recorded.bank if recorded else Bank.load(path)
        tree = bank.trees[bank.best if name is None else bank.find(name)]
        whole = form.whole_bank and name is None
        subject = cls(path, form, bank, recorded, tree, bank.trees if whole else (tree,), costs)
        if not subject.depth:
            raise TreeError(
                f"tree {tree.id} drafts nothing",
                "a tree with nodes",
                "name another tree of the bank with --tree, or serve without heads",
            )
        return subject

    @property
    def depth(self) -> int:
        """Of the deepest tree that is exported."""
        return max(tree.depth for tree in self.trees)

    @property
    def run(self) -> Recorded:
        """The run of the bank; `ArtifactError` for a bank that lies in none."""
        if self.recorded is None:
            raise ArtifactError(
                f"{self.path} lies in no run folder, and {self.form.name} is found by replay",
                f"{RUN}, the trace and the costs beside it",
                "name the run folder, or a form that holds the tree itself, such as medusa",
            )
        return self.recorded

    @cached_property
    def costs(self) -> Costs:
        """At the context length of the bank's own."""
        return self.run.costs(self.costs_file)

    @cached_property
    def fitted_on(self) -> Trace:
        """Texts to choose on."""
        return Trace.joined([self.run.trace(split) for split in FITTED_ON])

    @cached_property
    def judged_on(self) -> Trace:
        """Texts that chose nothing."""
        return self.run.trace(JUDGED_ON)

    def figures(self, tree: Tree) -> Figures:
        """Of a fixed tree, where nothing was chosen."""
        return fixed(self.judged_on, tree, float(self.costs.step_ms([tree])[0]))

    def loss(self, what: str, figures: Figures) -> str:
        """What replay says of the closest fit, beside the tree it stands for."""
        own = self.figures(self.tree)
        said = [_compared(figures.mean_emitted, own.mean_emitted, 3, "emitted tokens per step")]
        if own.tokens_per_second and figures.tokens_per_second:
            pair = figures.tokens_per_second, own.tokens_per_second
            said.append(_compared(*pair, 2, "tokens/s"))
        return (
            f"{what}: predicted {' and '.join(said)} of {self.tree.id}, by replay of the "
            f"{JUDGED_ON} split ({self.judged_on.n_prompts} prompts) under "
            f"{self.costs_file or TIMING}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be known of any file in this form."""
        form, bank = self.form, self.bank
        kind = bank.heads.get("kind", "unknown")
        notes = [
            f"read by {form.engine}: {form.versions}",
            f"cannot express {form.cannot}",
            f"tree {self.tree.id}: {self.tree.n_nodes} nodes, depth {self.tree.depth}",
        ]
        if len(self.trees) > 1:
            notes[-1] = f"the chains of {len(self.trees)} trees, to depth {self.depth}"
        elif bank.auto != STATIC:
            notes.append(
                f"the bank's choice is its policy {bank.auto}, which no engine's file holds"
            )
        if kind not in form.kinds:
            notes.append(
                f"measured with {kind} heads; {form.engine.split(',')[0]} drafts with "
                f"{form.drafts_with}, and acceptance is theirs: build a bank with what you serve"
            )
        return tuple(notes)


def _compared(new: float, old: float, digits: int, unit: str) -> str:
    change = f"{100 * (new / old - 1):+.1f} %"
    return f"{new:.{digits}f} {unit} instead of {old:.{digits}f} ({change})"

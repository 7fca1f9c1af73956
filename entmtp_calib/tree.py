"""Speculation trees as values: prefix-closed sets of rank paths.

A tree says which drafted continuations one verify pass checks. Its nodes are rank paths from the
root (the token the target has already chosen): `(0, 2)` is the third choice after the first one.
The root itself is not a node; the empty tree is plain decoding. Nodes are always kept in
(depth, path) order, and row k + 1 of everything built from a tree is its node k (row 0 is the
root). This module knows no arrays, no models and no files.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from entmtp_calib.errors import TreeError

Path = tuple[int, ...]

RANK_LIMIT = 2**15  # ranks are stored as int16
_HOW_TO_WRITE = "write a tree as [[0], [1], [0, 0]], a path of child ranks per node"


@dataclass(frozen=True)
class Tree:
    """A prefix-closed set of distinct rank paths, in (depth, path) order.

    Raises:
        TreeError: naming every path that is malformed, repeated, or lacks its parent.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        paths = sorted(map(tuple, self.paths), key=lambda path: (len(path), path))
        _check(paths)
        object.__setattr__(self, "paths", tuple(paths))

    @classmethod
    def of(cls, paths: Iterable[Iterable[int]]) -> Tree:
        """The tree of these paths, in any order and of any integer type."""
        return cls(tuple(_plain_path(path) for path in paths))

    @classmethod
    def parse(cls, text: str) -> Tree:
        """Read a tree written as a JSON or Python list of paths; "[]" is the empty tree."""
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = None
        if not isinstance(value, list | tuple):
            raise TreeError(f"tree {text[:80]!r}", "a list of paths", _HOW_TO_WRITE)
        return cls.of(value)

    @property
    def n_nodes(self) -> int:
        """Drafted nodes, the root not counted; one verify pass has n_nodes + 1 rows."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Length of the longest path; 0 for the empty tree."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def max_rank(self) -> int:
        """The largest child rank in use; -1 for the empty tree."""
        return max((path[-1] for path in self.paths), default=-1)

    @cached_property
    def parents(self) -> Path:
        """Row of each row's parent, [n_nodes + 1], the root (parent -1) first."""
        rows = {path: row for row, path in enumerate(((), *self.paths))}
        return (-1, *(rows[path[:-1]] for path in self.paths))

    @cached_property
    def depths(self) -> Path:
        """Depth of each row, [n_nodes + 1], the root (depth 0) first."""
        return (0, *map(len, self.paths))

    @cached_property
    def id(self) -> str:
        """A short name that depends on the paths only."""
        if not self.paths:
            return "plain"
        if self.paths == _chain_paths(self.depth):
            return f"chain-{self.depth}"
        if self.paths in _PUBLISHED:
            return _PUBLISHED[self.paths]
        digest = hashlib.sha256(json.dumps(self.paths).encode()).hexdigest()
        return f"t{self.n_nodes}d{self.depth}-{digest[:6]}"

    def with_node(self, path: Iterable[int]) -> Tree:
        """This tree and one more node, whose parent it must already contain."""
        return Tree((*self.paths, _plain_path(path)))

    def growth_candidates(self, max_depth: int, n_ranks: int) -> list[Path]:
        """The nodes this tree may grow by: under each parent, the next free rank.

        Args:
            max_depth: no candidate is deeper.
            n_ranks: child ranks below this one may be used.
        """
        taken = set(self.paths)
        candidates = []
        for parent in ((), *self.paths):
            if len(parent) < max_depth:
                rank = 0
                while (*parent, rank) in taken:
                    rank += 1
                if rank < n_ranks:
                    candidates.append((*parent, rank))
        return sorted(candidates, key=lambda path: (len(path), path))

    def to_list(self) -> list[list[int]]:
        """The paths as nested lists, for JSON; `Tree.of` reads them back."""
        return [list(path) for path in self.paths]


def chain(depth: int) -> Tree:
    """The greedy chain: the first choice at every depth, no branches."""
    return Tree(_chain_paths(depth))


def union(trees: Iterable[Tree]) -> Tree:
    """The smallest tree that contains all of these."""
    return Tree(tuple({path for tree in trees for path in tree.paths}))


def draw(tree: Tree) -> str:
    """The tree as text, one node a line, named by its child rank."""
    return "\n".join(["root", *(stem + str(path[-1]) for path, stem in stems(tree))])


def stems(tree: Tree) -> Iterator[tuple[Path, str]]:
    """The nodes in the order of a drawing, each with the lines that lead to it."""
    last = {path[:-1]: path[-1] for path in tree.paths}  # siblings stand in rising order
    for path in sorted(tree.paths):  # lexicographic order visits a parent before its children
        ends = [last[path[:level]] == path[level] for level in range(len(path))]
        lines = ["   " if end else "│  " for end in ends[:-1]]
        yield path, "".join(lines) + ("└─ " if ends[-1] else "├─ ")


def _plain_path(path: Iterable[int]) -> Path:
    """Integers of any type (NumPy's too) as built-in ones; anything else is refused."""
    try:
        ranks = tuple(path)
        plain = tuple(rank.__index__() for rank in ranks)
    except (TypeError, AttributeError):
        raise TreeError(f"{path!r} is not a path", "a list of child ranks", _HOW_TO_WRITE) from None
    if isinstance(path, str | bytes) or any(isinstance(rank, bool) for rank in ranks):
        raise TreeError(f"{path!r} is not a path", "a list of child ranks", _HOW_TO_WRITE)
    return plain


def _check(paths: list[Path]) -> None:
    """Raise one TreeError with everything that is wrong with sorted paths."""
    known = set(paths)
    problems = []
    if () in known:
        problems.append("an empty path (the root is implicit)")
    wrong = [path for path in known if not all(0 <= rank < RANK_LIMIT for rank in path)]
    orphans = [path for path in known if len(path) > 1 and path[:-1] not in known]
    repeated = [path for path, after in pairwise(paths) if path == after]
    for found, what in (
        (wrong, f"child ranks outside 0..{RANK_LIMIT - 1} in"),
        (repeated, "repeated:"),
        (orphans, "parent missing of"),
    ):
        if found:
            problems.append(f"{what} {', '.join(str(list(path)) for path in sorted(found)[:5])}")
    if problems:
        raise TreeError(
            f"the tree has {', '.join(problems)}",
            "distinct paths with all their prefixes",
            _HOW_TO_WRITE,
        )


def _chain_paths(depth: int) -> tuple[Path, ...]:
    return tuple((0,) * length for length in range(1, depth + 1))


def _paths_of_child_counts(counts: dict[Path, int]) -> tuple[Path, ...]:
    """All paths of the tree in which each given parent has its first `count` children."""
    paths = [(*parent, rank) for parent, count in counts.items() for rank in range(count)]
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


# The 63-node tree that Hydra and Medusa decode Vicuna-7B with, as children per parent.
_HYDRA_PATHS = _paths_of_child_counts(
    {(): 10}
    | {(rank,): count for rank, count in enumerate([10, 7, 3, 2, 1, 1, 1, 1, 1, 1])}
    | {(0, rank): count for rank, count in enumerate([10, 3, 2, 1, 1, 1, 1, 1])}
    | {(1, 0): 2, (2, 0): 1, (0, 0, 0): 2}
)
# The one that Medusa-2 decodes its fine-tuned Vicuna-7B with (`vicuna_7b_stage2`).
_MEDUSA2_PATHS = _paths_of_child_counts(
    {(): 10}
    | {(rank,): count for rank, count in enumerate([10, 5, 2, 2, 1, 1, 1, 1])}
    | {(0, rank): count for rank, count in enumerate([9, 4, 2, 1, 1, 1])}
    | {(1, 0): 3, (1, 1): 1, (2, 0): 1}
    | {(0, 0, 0): 4, (0, 0, 1): 1, (0, 0, 2): 1, (0, 1, 0): 1}
)
_PUBLISHED = {_HYDRA_PATHS: "hydra-default", _MEDUSA2_PATHS: "medusa2-default"}

EMPTY = Tree(())
HYDRA_DEFAULT = Tree(_HYDRA_PATHS)
"""Medusa's default too: both ship the same list, `mc_sim_7b_63`."""
MEDUSA2_DEFAULT = Tree(_MEDUSA2_PATHS)

"""Trees in the forms of other engines, read back: the form is recognised by what it looks like.

A list that holds every prefix of its paths is a list of nodes; one in which no path goes on from
another is TensorRT-LLM's list of leaves; counts that begin with 1 are Medusa's dense form. What is
wrong with a tree is not raised but told, a line each, so that a user sees all of it at once. This
module knows no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from entmtp_calib.errors import TreeError, UsageError
from entmtp_calib.formats import growmap
from entmtp_calib.formats.chains import (
    CANDIDATES,
    SCHEDULE,
    SglangNumbers,
    adaptive_steps,
    schedule_steps,
)
from entmtp_calib.formats.engines import FORMS
from entmtp_calib.formats.lists import MAX_DEPTH, MAX_NODES, dense_paths, with_prefixes
from entmtp_calib.formats.literals import literal, text_of, value_of
from entmtp_calib.formats.trees_file import named_paths
from entmtp_calib.tree import RANK_LIMIT, Path, Tree, chain

DENSE = "dense"
NODES, LEAVES = ("medusa", "eagle", "vllm-tree"), ("trtllm", "trtllm-bench")
READABLE = (DENSE, *FORMS)
_TREE_KEYS = ("medusa_choices", "eagle_choices", "tree_choices", "speculative_token_tree")
_EXPECTED = "paths as [[0], [1], [0, 0]], leaves, counts as [1, 7, 6], or a form of entmtp export"


@dataclass(frozen=True)
class Limits:
    """What the heads can draft: levels, and choices under a node."""

    n_heads: int
    n_ranks: int


@dataclass(frozen=True)
class Listed:
    """A tree as it was found, before it is known to be one.

    Attributes:
        name: what its file calls it.
        form: how it was written.
        paths: its nodes, with what the form implies.
        implied: how many of them are implied.
    """

    name: str
    form: str
    paths: tuple[Path, ...]
    implied: int = 0

    @property
    def tree(self) -> Tree:
        """The tree; `TreeError` where there are problems."""
        return Tree(self.paths)

    def problems(self, limits: Limits | None = None) -> list[str]:
        """Everything that is wrong with it, a line each.

        Args:
            limits: of the heads that shall draft it, where they are known.
        """
        known, counts = set(self.paths), Counter(self.paths)
        found = [] if self.paths else ["it has no node: plain decoding is always a candidate"]
        found += [f"{_written(path)} is listed {n} times" for path, n in counts.items() if n > 1]
        for path in counts:
            found += _path_problems(path, limits)
            if len(path) > 1 and path[:-1] not in known:
                found.append(f"{_written(path)} lacks its parent {_written(path[:-1])}")
        return [f"{self.name}: {problem}" for problem in found]


def read(data: bytes, name: str, form: str | None = None) -> list[Listed]:
    """All trees of a file's content.

    Args:
        data: the content.
        name: of a tree that the content gives no name.
        form: one of `READABLE`, where it shall not be recognised.

    Raises:
        TreeError: there is no tree in it, or one is written in another form.
        UsageError: there is no such form.
    """
    if form is not None and form not in READABLE:
        raise UsageError(f"--format {form}", f"one of {', '.join(READABLE)}")
    try:
        found = _found(data, name, form)
    except RecursionError:
        raise TreeError("values in values without end", _EXPECTED) from None
    if not found:
        raise TreeError("there is no tree in it", _EXPECTED)
    other = [listed for listed in found if form not in (None, listed.form)]
    if other:
        raise TreeError(
            f"{other[0].name} is written as {other[0].form}", f"{form}, as --format says"
        )
    return found


def _found(data: bytes, name: str, form: str | None) -> list[Listed]:
    if data.startswith(growmap.ZIP_MAGIC):
        return [Listed(name, "sequoia", growmap.read(data).paths)]
    text = text_of(data)
    numbers = _sglang_numbers(text)
    if numbers:
        return [Listed(name, "sglang", _sglang_chain(numbers).paths)]
    return _in_value(value_of(text), name, form)


def _in_value(value: Any, name: str, form: str | None) -> list[Listed]:
    """The trees in a value of any shape; none where it holds none."""
    if isinstance(value, str):
        return _in_value(literal(value), name, form) if value.lstrip()[:1] in "[(" else []
    if isinstance(value, Mapping):
        return _in_mapping(value, name, form)
    if not isinstance(value, list | tuple) or not value:
        return []
    if all(map(_is_rank, value)):
        return [Listed(name, DENSE, tuple(dense_paths(value)))]
    if all(map(_is_path, value)):
        return [_listed([tuple(path) for path in value], name, form)]
    if all(map(_is_listing, value)):
        several = [_in_value(item, f"{name}[{n}]", form) for n, item in enumerate(value)]
        return [listed for found in several for listed in found]
    raise TreeError(f"{name} is a list of neither paths nor counts", _EXPECTED)


def _in_mapping(value: Mapping[Any, Any], name: str, form: str | None) -> list[Listed]:
    """A config's chains or trees, by the keys that are known; else every value that is a tree."""
    try:
        if SCHEDULE in value:
            return _chains(name, "vllm-schedule", schedule_steps(value))
        if CANDIDATES in value or any(
            isinstance(slot, Mapping) and CANDIDATES in slot for slot in value.values()
        ):
            return _chains(name, "sglang-adaptive", adaptive_steps(value))
    except (TypeError, ValueError, IndexError, AttributeError):
        raise TreeError(f"{name} holds no steps that are numbers", _EXPECTED) from None
    if isinstance(conditions := value.get("measurement_conditions"), Mapping):
        found = _in_mapping(conditions, name, form)
        return [Listed(name, "modelopt", each.paths) for each in found]
    named = named_paths(value, name)
    if named is None and any(key in value for key in _TREE_KEYS):
        named = [(name, value[key]) for key in _TREE_KEYS if key in value]
    elif named is None:
        named = [(str(key), item) for key, item in value.items() if _may_hold(item, form)]
    return [listed for key, item in named for listed in _in_value(item, key, form)]


def _listed(paths: list[Path], name: str, form: str | None) -> Listed:
    """A list of paths; where the form is not given, leaves are what lacks all its prefixes."""
    _check_size(name, len(paths), max(map(len, paths)))
    known = set(paths)
    lacking = any(path[:-1] not in known for path in paths if len(path) > 1)
    parents = {path[:end] for path in paths for end in range(1, len(path))}
    as_leaves = form in LEAVES if form is not None else lacking and not parents & known
    if not as_leaves:
        return Listed(name, form if form in NODES else NODES[0], tuple(paths))
    whole = with_prefixes(paths)
    _check_size(name, len(whole), 0)
    return Listed(name, form or LEAVES[0], tuple(whole), len(whole) - len(paths))


def _chains(name: str, form: str, depths: list[int]) -> list[Listed]:
    _check_size(name, 0, max(depths, default=0))
    return [Listed(f"{name}[{depth}]", form, chain(depth).paths) for depth in depths]


def _check_size(name: str, n_nodes: int, depth: int) -> None:
    if n_nodes > MAX_NODES or depth > MAX_DEPTH:
        what = f"{n_nodes} nodes" if n_nodes > MAX_NODES else f"depth {depth}"
        raise TreeError(f"{name} has {what}", f"at most {MAX_NODES} nodes and depth {MAX_DEPTH}")


def _sglang_numbers(text: str) -> SglangNumbers | None:
    try:
        return SglangNumbers.parse(text)
    except ValueError as error:
        raise TreeError(str(error), "numbers that SGLang takes") from None


def _sglang_chain(numbers: SglangNumbers) -> Tree:
    if numbers.topk > 1:
        raise TreeError(
            f"{numbers.flags()} names no tree",
            "--speculative-eagle-topk 1, a chain; else SGLang builds a tree anew each step",
        )
    return chain(numbers.steps)


def _path_problems(path: Path, limits: Limits | None) -> list[str]:
    written = _written(path)
    if not path:
        return ["[] is listed, and the root is implied"]
    problems = []
    if not all(0 <= rank < RANK_LIMIT for rank in path):
        problems.append(f"{written} has a child rank outside 0 to {RANK_LIMIT - 1}")
    elif limits and path[-1] >= limits.n_ranks:
        problems.append(
            f"{written} has child rank {path[-1]}, and the heads rank {limits.n_ranks} choices"
        )
    if limits and len(path) > limits.n_heads:
        problems.append(f"{written} has depth {len(path)}, and there are {limits.n_heads} heads")
    return problems


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_path(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_rank, value))


def _may_hold(value: Any, form: str | None) -> bool:
    """Whether to look into what stands under an unknown key; mere numbers may mean anything."""
    if isinstance(value, list | tuple) and value:
        numbers = form == DENSE and all(map(_is_rank, value))
        return numbers or _is_listing(value) or all(map(_is_listing, value))
    return isinstance(value, Mapping)


def _is_listing(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_path, value))


def _written(path: Path) -> str:
    return str(list(path))

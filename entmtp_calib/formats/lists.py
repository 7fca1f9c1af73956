"""Trees as lists of rank paths: what Medusa, Hydra, EAGLE-1, TensorRT-LLM and vLLM's tree read.

A path is the child ranks from the root, and the root is implied. Medusa, Hydra and EAGLE-1 want
every node; TensorRT-LLM takes the leaves and implies their prefixes; vLLM takes a string that holds
a list of tuples, level by level. This module knows no files and no engine but for its list.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from entmtp_calib.errors import TreeError
from entmtp_calib.tree import Path, Tree

RANKS = 10
"""Child ranks that Medusa's and EAGLE-1's buffers hold per head; a larger one names another head's
first choices (Medusa, `generate_medusa_buffers`)."""
MAX_DEPTH, MAX_NODES = 128, 1024  # far beyond any tree in use; what is larger is a mistake


def node_list(tree: Tree) -> str:
    """Every node as `[[0], [1], [0, 0]]`, for Medusa, Hydra and EAGLE-1.

    Raises:
        TreeError: for a child rank that their buffers do not hold.
    """
    if tree.max_rank >= RANKS:
        raise TreeError(
            f"tree {tree.id} has child rank {tree.max_rank}",
            f"ranks 0 to {RANKS - 1}, all that Medusa and EAGLE-1 hold",
            "export another tree of the bank with --tree, or build it with --max-rank 10",
        )
    return json.dumps(tree.to_list()) + "\n"


def leaf_flag(tree: Tree) -> str:
    """The leaves as TensorRT-LLM's flag `--medusa_choices="[[0, 0], [1]]"`."""
    return f'--medusa_choices="{json.dumps([list(path) for path in leaves(tree)])}"\n'


def node_yaml(tree: Tree, comments: Iterable[str] = ()) -> str:
    """Every node as an item of a YAML list, a line each, for trtllm-bench.

    Args:
        comments: lines that stand before it.
    """
    lines = [f"# {comment}\n" for comment in comments]
    return "".join([*lines, *(f"- {list(path)}\n" for path in tree.paths)])


def token_tree(tree: Tree) -> str:
    """vLLM's speculative config: the nodes, level by level, in a string."""
    nodes = str(list(tree.paths))
    return json.dumps({"num_speculative_tokens": tree.n_nodes, "speculative_token_tree": nodes})


def eagle_config(tree: Tree) -> str:
    """The call that configures a fixed tree in TensorRT-LLM's LLM API, where it takes one."""
    parents = Counter(len(path) for path in {path[:-1] for path in tree.paths})
    return (
        f"EagleDecodingConfig(eagle_choices={tree.to_list()}, max_draft_len={tree.n_nodes}, "
        f"num_eagle_layers={tree.depth}, max_non_leaves_per_layer={max(10, *parents.values())})"
    )


def leaves(tree: Tree) -> list[Path]:
    """The paths that no other path goes on from, in the tree's order."""
    parents = {path[:-1] for path in tree.paths}
    return [path for path in tree.paths if path not in parents]


def with_prefixes(paths: Iterable[Path]) -> list[Path]:
    """The paths and whatever of their prefixes is not among them, in (depth, path) order."""
    listed = list(paths)
    implied = {path[:end] for path in listed for end in range(1, len(path))} - set(listed)
    return sorted([*listed, *implied], key=lambda path: (len(path), path))


def dense_paths(counts: Sequence[int]) -> list[Path]:
    """All nodes of Medusa's older form `[1, 7, 6]`: one root, 7 children, 6 under each of these.

    Raises:
        TreeError: the counts are no such form, or make too many nodes.
    """
    wanted = "counts per level that begin with the root, such as [1, 7, 6]"
    if len(counts) < 2 or counts[0] != 1 or min(counts) < 1:
        raise TreeError(f"counts {list(counts)[:8]}", wanted)
    nodes, width = 0, 1
    for count in counts[1:]:
        width *= count
        nodes += width
        if nodes > MAX_NODES:
            raise TreeError(f"counts {list(counts)[:8]}", f"at most {MAX_NODES} nodes")
    level: list[Path] = [()]
    paths: list[Path] = []
    for count in counts[1:]:
        level = [(*path, rank) for path in level for rank in range(count)]
        paths += level
    return paths


def skipped_siblings(tree: Tree) -> list[Path]:
    """The nodes with children that stand behind a sibling without any, or behind a missing one.

    Hydra expands the first so many children of a node, counted, so it would draft these nodes'
    children under other tokens.
    """
    parents = {path[:-1] for path in tree.paths}
    return [
        path
        for path in tree.paths
        if path in parents and any((*path[:-1], rank) not in parents for rank in range(path[-1]))
    ]


def rank_gaps(tree: Tree) -> list[Path]:
    """The nodes whose lower-ranked sibling is not in the tree."""
    known = set(tree.paths)
    return [path for path in tree.paths if path[-1] and (*path[:-1], path[-1] - 1) not in known]


def uneven_level(tree: Tree) -> int | None:
    """The first depth at which not every node one above has as many children; None if none is."""
    children = Counter(path[:-1] for path in tree.paths)
    for depth in range(1, tree.depth + 1):
        above = [path for path in ((), *tree.paths) if len(path) == depth - 1]
        if len({children[path] for path in above}) > 1:
            return depth
    return None

"""Our own small file of trees: what `import-trees` writes and `build-bank` takes as candidates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from entmtp_calib import files
from entmtp_calib.errors import TreeError
from entmtp_calib.records import FORMAT_VERSION
from entmtp_calib.tree import Tree

TREES = "trees"


def trees_document(named: Iterable[tuple[str, Tree]], source: str) -> dict[str, Any]:
    """The file's JSON object.

    Args:
        named: the trees and what their source calls them.
        source: the file they are from.
    """
    return {
        "format_version": FORMAT_VERSION,
        "source": source,
        TREES: [
            {
                "name": name,
                "id": tree.id,
                "n_nodes": tree.n_nodes,
                "depth": tree.depth,
                "paths": tree.to_list(),
            }
            for name, tree in named
        ],
    }


def read_trees(path: Path) -> list[Tree]:
    """The trees of a file that `import-trees` wrote, each once, in its order.

    Raises:
        ArtifactError: naming the file and what is wrong with it.
    """
    entries = files.read_versioned(path, {TREES: list})[TREES]
    trees: dict[Tree, None] = {}
    for number, entry in enumerate(entries):
        try:
            trees[Tree.of(entry["paths"])] = None
        except (KeyError, TypeError, TreeError) as error:
            problem = getattr(error, "found", "no paths")
            raise files.damaged(path, f"tree {number}: {problem}") from None
    return list(trees)

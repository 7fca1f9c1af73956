"""Our own small form of trees: what `import-trees` writes. This module knows no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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


def named_paths(document: Mapping[Any, Any], name: str) -> list[tuple[str, Any]] | None:
    """What stands in such an object: names and paths, unchecked; None where it is none.

    Args:
        document: the object.
        name: of a tree that has none.

    Raises:
        TreeError: it is of another format version, or a tree has no paths.
    """
    entries = document.get(TREES)
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        return None
    version = document.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        found = f"{name} has format version {version}"
        raise TreeError(found, f"version {FORMAT_VERSION}", "update entmtp")
    if not all(entry.get("paths") for entry in entries):
        raise TreeError(f"{name} has a tree without paths", "paths as [[0], [1], [0, 0]]")
    return [(str(entry.get("name") or name), entry["paths"]) for entry in entries]

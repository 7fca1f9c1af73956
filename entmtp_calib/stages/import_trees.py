"""Import: a user's own trees, in whatever form, as candidates for a bank.

Torch is loaded only to read a grow map or heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entmtp_calib import files
from entmtp_calib.errors import HeadsError, TreeError
from entmtp_calib.formats.reading import Limits, Listed, read
from entmtp_calib.formats.trees_file import trees_document
from entmtp_calib.tree import Tree


@dataclass(frozen=True)
class Imported:
    """What was found in a file.

    Attributes:
        source: the file.
        listed: its trees.
        problems: what is wrong with them, a line each; where there are any, no tree may be used.
    """

    source: Path
    listed: list[Listed]
    problems: list[str]

    @property
    def trees(self) -> list[tuple[str, Tree]]:
        """The trees with their names; raises `TreeError` for any problem."""
        if self.problems:
            more = f" and {len(self.problems) - 1} more" if len(self.problems) > 1 else ""
            raise TreeError(
                f"{self.source}: {self.problems[0]}{more}",
                action="correct the file, or take one of its trees with entmtp import-trees --tree",
            )
        return [(each.name, each.tree) for each in self.listed]

    def document(self) -> dict[str, Any]:
        """The file of trees to write, see `trees_document`; raises `TreeError` for any problem."""
        return trees_document(self.trees, str(self.source))


def import_trees(
    path: Path, form: str | None = None, heads: Path | None = None, only: str | None = None
) -> Imported:
    """Read a file of trees and check them.

    Args:
        path: JSON, YAML, Python, flags, or a grow map.
        form: how it is written, where that shall not be recognised (`reading.READABLE`).
        heads: a folder of heads that shall draft the trees; None to check the trees alone.
        only: the name of the one tree to take.

    Raises:
        TreeError: there is no tree in the file, or none of that name.
    """
    limits = head_limits(heads) if heads else None
    data = files.read_bytes(path)
    try:
        listed = read(data, path.name.split(".")[0], form)
    except TreeError as error:
        raise TreeError(f"{path}: {error.found}", error.expected, error.action) from None
    if only is not None:
        names = [each.name for each in listed]
        listed = [each for each in listed if each.name == only]
        if not listed:
            raise TreeError(f"{path} has no tree {only!r}", f"one of {', '.join(names)}")
    return Imported(path, listed, [line for each in listed for line in each.problems(limits)])


def head_limits(folder: Path) -> Limits:
    """What the heads of a folder can draft, from their description alone; raises `HeadsError`."""
    from entmtp_calib.heads.model import RANK_CAP, HeadsConfig
    from entmtp_calib.heads.native import read_description

    try:
        config = HeadsConfig.from_dict(read_description(folder)["architecture"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = f"{folder} does not describe heads ({error!r})"
        raise HeadsError(found, "an architecture", "copy it again") from error
    return Limits(config.n_heads, min(RANK_CAP, config.draft_vocab_size or config.vocab_size))

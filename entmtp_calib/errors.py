"""What a user can get wrong, each with what to do next.

One family, so that the command line has one boundary that prints one line and exits. A message has
three parts: what was found, what was expected, and what to do. Bugs of ours are not in the family:
they raise as they are. This module knows no other.
"""

from __future__ import annotations


class EntmtpError(Exception):
    """A condition the user can act on; `str()` is one line.

    Args:
        found: what is there, naming the file, flag or value.
        expected: what should be there.
        action: what to do or run next.
    """

    exit_code = 1

    def __init__(self, found: str, expected: str | None = None, action: str | None = None) -> None:
        self.found, self.expected, self.action = found, expected, action
        parts = [found]
        if expected:
            parts.append(f"expected {expected}")
        if action:
            parts.append(action)
        super().__init__("; ".join(" ".join(part.split()) for part in parts))


class UsageError(EntmtpError):
    """A flag or an argument has a value that can never work; exit code 2."""

    exit_code = 2


class DataError(EntmtpError):
    """Calibration data is missing, malformed or too small."""


class ModelError(EntmtpError):
    """The target cannot be loaded, cannot verify trees, or computes values that are not finite."""


class HeadsError(EntmtpError):
    """Heads are missing, damaged, or made for another target."""


class TreeError(EntmtpError):
    """A tree is malformed, or deeper or wider than what it shall run on."""


class ArtifactError(EntmtpError):
    """A run folder or one of its files is missing, damaged, or of another format version."""


class BusyError(ArtifactError):
    """Another process holds the run folder."""


class EntmtpWarning(UserWarning):
    """Something works, but not as well as it could; `str()` is one line."""

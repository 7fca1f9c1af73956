"""Files of a Hugging Face repository, fetched once into the hub's own cache.

It knows names, revisions and patterns, and not what the files are for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from entmtp_calib.errors import EntmtpError
from entmtp_calib.targets.network import first_line, quiet

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


def is_hub_id(name: str) -> bool:
    """Whether a name can be that of a repository: NAME or OWNER/NAME, with @REVISION or without."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def fetch(name: str, patterns: Sequence[str], what: str, error: type[EntmtpError]) -> Path:
    """Local snapshot of a repository: the files in its root that match a pattern.

    Args:
        name: OWNER/NAME, or OWNER/NAME@REVISION.
        what: "model" or "heads", for the message; the flag of that name is what to check.
        error: raised where there is no such repository, or no way to it.
    """
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        with quiet():
            folder = snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=list(patterns),
                ignore_patterns=["*/*", "consolidated*"],
            )
    except (OSError, ValueError, RuntimeError) as cause:
        raise error(
            f"{what} '{name}' is no local folder and cannot be fetched ({first_line(cause)})",
            action=f"check --{what}, the network, and `hf auth login` for gated models",
        ) from cause
    return Path(folder)

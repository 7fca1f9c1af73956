"""Heads that are imported on the way belong to the test, not to the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of entmtp's."""
    monkeypatch.setenv("ENTMTP_CACHE", str(tmp_path / "entmtp-cache"))
    return tmp_path / "entmtp-cache"

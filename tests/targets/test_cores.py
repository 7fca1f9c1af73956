"""Cores that may be used: affinity and cgroup quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entmtp_calib.targets.cores import cgroup_quota, usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)


def unified(folder: Path, text: str) -> Path:
    (folder / "cpu.max").write_text(text)
    return folder


def test_affinity_counts_where_no_quota_is_set(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8
    assert usable_cores(unified(tmp_path, "max 100000\n")) == 8


@pytest.mark.parametrize(
    ("text", "cores"),
    [("100000 100000", 1), ("250000 100000", 2), ("50000 100000", 1), ("3200000 100000", 8)],
)
def test_a_quota_bounds_the_cores(tmp_path: Path, text: str, cores: int) -> None:
    assert usable_cores(unified(tmp_path, text)) == cores


def test_the_older_cgroup_files_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cgroup_quota(tmp_path) == 1.5
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    assert cgroup_quota(tmp_path) is None

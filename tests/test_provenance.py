"""The record of the machine says what decides speed, and nothing that does not."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entmtp_calib import provenance as module
from entmtp_calib.provenance import (
    cgroup_cores,
    differences,
    hardware,
    hardware_fingerprint,
    provenance,
    sha256_file,
    sha256_json,
    usable_cores,
)
from entmtp_calib.records import strict_json

FACTS: dict[str, Any] = {
    "cpu": "Some CPU",
    "usable_cores": 2,
    "torch_threads": 2,
    "torch_version": "2.9.0",
    "device_name": "cpu",
    "load_average": 0.5,
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_record_names_machine_versions_command_and_seeds() -> None:
    record = provenance(["entmtp", "time", "a bank"], {"order": 3}, {"model": "toy"})
    assert record["command"] == "entmtp time 'a bank'"
    assert record["seeds"] == {"order": 3}
    assert record["model"] == "toy"
    assert record["versions"]["numpy"]
    assert record["hardware"]["usable_cores"] >= 1
    assert record["hardware_fingerprint"] == hardware_fingerprint(record["hardware"])
    strict_json(record)


def test_a_record_does_not_name_the_host() -> None:
    node = os.uname().nodename
    assert len(node) < 4 or node not in strict_json(provenance(["entmtp"], {}))


def test_the_record_needs_no_torch() -> None:
    code = "import sys, entmtp_calib.provenance as p; p.hardware(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_threads_and_device_are_those_of_a_loaded_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(get_device_name=lambda device: f"GPU at {device}")
    torch = SimpleNamespace(get_num_threads=lambda: 3, cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert hardware()["torch_threads"] == 3
    assert hardware()["device_name"] == "cpu"
    assert hardware("cuda:0")["device_name"] == "GPU at cuda:0"


def test_affinity_limits_the_usable_cores() -> None:
    code = "from entmtp_calib.provenance import usable_cores; print(usable_cores())"
    one = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, [{one}]); {code}"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "1"


@pytest.mark.parametrize(("quota", "cores"), [(1.0, 1), (1.9, 1), (0.5, 1), (None, 8), (64.0, 8)])
def test_the_quota_limits_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(module, "_affinity_cores", lambda: 8)
    monkeypatch.setattr(module, "cgroup_cores", lambda: quota)
    assert usable_cores() == cores


def test_the_tightest_quota_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
    }
    assert cgroup_cores(write(tmp_path, files)) == 1.5


def test_the_older_quota_files_are_read_where_the_group_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/host/name\n4:memory:/x\n0::/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert cgroup_cores(write(tmp_path, files)) == 2


@pytest.mark.parametrize("quota", ["-1\n", "rubbish"])
def test_no_quota_is_no_limit(tmp_path: Path, quota: str) -> None:
    assert cgroup_cores(tmp_path) is None
    files = {
        "proc/self/cgroup": "5:cpu:/\n0::/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    }
    assert cgroup_cores(write(tmp_path, files)) is None


@pytest.mark.parametrize(
    ("fact", "another"),
    [("cpu", "B"), ("usable_cores", 1), ("torch_threads", 1), ("device_name", "G")],
)
def test_what_decides_speed_changes_the_fingerprint_and_is_named(fact: str, another: Any) -> None:
    other = FACTS | {fact: another}
    assert hardware_fingerprint(other) != hardware_fingerprint(FACTS)
    (line,) = differences(FACTS, other)
    assert f"{FACTS[fact]} then, {another} now" in line


def test_load_is_named_only_when_it_differs_by_more_than_the_cores() -> None:
    assert differences(FACTS, FACTS | {"load_average": 2.4}) == []
    (line,) = differences(FACTS, FACTS | {"load_average": 4.0})
    assert line == "load average 0.5 then, 4.0 now, on 2 cores"
    assert hardware_fingerprint(FACTS | {"load_average": 4.0}) == hardware_fingerprint(FACTS)


def test_what_one_side_could_not_tell_is_no_difference() -> None:
    assert differences(FACTS, FACTS | {"torch_threads": None}) == []
    assert differences({}, FACTS) == []


def test_hashes(tmp_path: Path) -> None:
    assert sha256_json({"a": 1, "b": (2,)}) == sha256_json({"b": [2], "a": 1})
    assert sha256_json({"a": 1}) != sha256_json({"a": 2})
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    assert sha256_file(path) == hashlib.sha256(b"x" * 3_000_000).hexdigest()

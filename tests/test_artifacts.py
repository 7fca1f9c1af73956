"""A run folder survives being killed, shared, damaged and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from entmtp_calib import files, records
from entmtp_calib import parts as parts_module
from entmtp_calib.artifacts import Effort, RunFolder
from entmtp_calib.errors import ArtifactError, BusyError

CONFIG = {"task": "gsm8k", "seed": 0}
INPUTS = {"model": "abc", "max_nodes": 4}


def finished(path: Path) -> Path:
    """A complete run of one stage."""
    with RunFolder.create(path, CONFIG) as folder:
        folder.write_json("result.json", [1, 2])
        folder.mark_done("stage", INPUTS, ["result.json"])
        folder.finish({"command": "entmtp build-bank"})
    return path


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_complete_run_verifies_and_reads_back(tmp_path: Path) -> None:
    path = finished(tmp_path / "models" / "run")
    folder = RunFolder.open(path)
    folder.verify()
    assert folder.config == CONFIG
    assert folder.read_json("result.json") == [1, 2]
    assert names(path) == ["manifest.json", "result.json", "run.json"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["result.json", "run.json"]
    assert manifest["provenance"]["command"] == "entmtp build-bank"
    assert manifest["format_version"] == 1


def test_tables_and_bytes_are_written_and_read(tmp_path: Path) -> None:
    table = records.table([], records.TIMING_SCHEMA)
    with RunFolder.create(tmp_path, CONFIG) as folder:
        folder.write_table("timing.parquet", table)
        folder.write_bytes("deep/data", b"\0")
        assert folder.read_table("timing.parquet", records.TIMING_SCHEMA).equals(table)
        folder.finish({})
        folder.verify()
        assert sorted(files.read_json(tmp_path / "manifest.json")["files"]) == [
            "deep/data",
            "run.json",
            "timing.parquet",
        ]


def test_a_stage_is_reused_only_for_the_same_inputs_and_untouched_outputs(tmp_path: Path) -> None:
    path = finished(tmp_path)
    with RunFolder.create(path, CONFIG) as folder:
        assert folder.is_done("stage", dict(reversed(INPUTS.items())))
        assert not folder.is_done("stage", INPUTS | {"max_nodes": 5})
        assert not folder.is_done("other", INPUTS)
        folder.verify()  # asking changes nothing
    (path / "result.json").write_text("[1, 3]")
    assert not RunFolder.open(path).is_done("stage", INPUTS)
    (path / "result.json").unlink()
    assert not RunFolder.open(path).is_done("stage", INPUTS)


def test_another_configuration_keeps_the_stages_and_drops_the_manifest(tmp_path: Path) -> None:
    path = finished(tmp_path)
    with RunFolder.create(path, CONFIG | {"seed": 1}) as folder:
        assert folder.config["seed"] == 1
        assert folder.is_done("stage", INPUTS)
        with pytest.raises(ArtifactError, match="unfinished"):
            folder.verify()


def test_any_change_makes_the_run_unfinished(tmp_path: Path) -> None:
    path = finished(tmp_path)
    with RunFolder.create(path, CONFIG) as folder:
        folder.write_json("more.json", 1)
    assert "manifest.json" not in names(path)


def test_a_folder_open_for_reading_refuses_to_write(tmp_path: Path) -> None:
    folder = RunFolder.open(finished(tmp_path))
    with pytest.raises(RuntimeError, match="reading only"):
        folder.write_json("result.json", 0)


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    folder = RunFolder.open(finished(tmp_path))
    with pytest.raises(ArtifactError, match=r"trace\.parquet is missing; make it with entmtp roll"):
        folder.read_table("trace.parquet", records.TRACE_SCHEMA)


def test_what_is_no_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no folder"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(ArtifactError, match=r"has no run\.json"):
        RunFolder.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="in the way"):
        RunFolder.create(tmp_path / "file", CONFIG)


@pytest.mark.parametrize("name", ["result.json", "run.json"])
def test_verify_names_every_missing_or_changed_file(tmp_path: Path, name: str) -> None:
    folder = RunFolder.open(finished(tmp_path))
    original = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(original[:-1])
    with pytest.raises(ArtifactError, match=rf"{name} is damaged"):
        folder.verify()
    (tmp_path / name).unlink()
    with pytest.raises(ArtifactError, match=rf"{name} is missing"):
        folder.verify()


@pytest.mark.parametrize("data", [b"", b'{"format_version": 1, "co', b"\x00\xff", b"[]", b"{}"])
@pytest.mark.parametrize("name", ["run.json", "manifest.json"])
def test_a_damaged_record_is_one_line_with_its_name(tmp_path: Path, name: str, data: bytes) -> None:
    path = finished(tmp_path)
    (path / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=name) as error:
        RunFolder.open(path).verify()
    assert "\n" not in str(error.value)
    if name == "run.json":
        with pytest.raises(ArtifactError, match=name):
            RunFolder.create(path, CONFIG)
        assert ".lock" not in names(path)


@pytest.mark.parametrize(
    "stages", [{"stage": 1}, {"stage": {"inputs": 1, "outputs": {}}}, {"stage": {"inputs": ""}}]
)
def test_stage_records_that_are_not_ours_are_refused(tmp_path: Path, stages: Any) -> None:
    path = finished(tmp_path)
    edit(path / "run.json", stages=stages)
    with pytest.raises(ArtifactError, match=r"run\.json is damaged"):
        RunFolder.open(path)


@pytest.mark.parametrize("name", ["run.json", "manifest.json"])
def test_another_format_version_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    path = finished(tmp_path)
    edit(path / name, format_version=2)
    with pytest.raises(ArtifactError, match=rf"{name} has format version 2; .* make it again"):
        RunFolder.open(path).verify()


def test_a_second_run_in_the_folder_is_told_who_holds_it(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG):
        with pytest.raises(BusyError, match=f"in use by process {os.getpid()}; wait"):
            RunFolder.create(tmp_path, CONFIG)
        RunFolder.open(tmp_path)
    RunFolder.create(tmp_path, CONFIG).close()


HOLD = """
import sys, pathlib
from entmtp_calib.artifacts import RunFolder
folder = RunFolder.create(pathlib.Path(sys.argv[1]), {})
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_kept_out_until_the_holder_dies(tmp_path: Path) -> None:
    with python(HOLD, tmp_path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"in use by process {holder.pid}"):
            RunFolder.create(tmp_path, CONFIG)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert ".lock" in names(tmp_path)
    RunFolder.create(tmp_path, CONFIG).close()
    assert ".lock" not in names(tmp_path)


def test_a_lock_file_of_a_dead_process_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("999999999")
    RunFolder.create(tmp_path, CONFIG).close()


RACE = """
import sys, time, pathlib
from entmtp_calib.artifacts import RunFolder
from entmtp_calib.errors import BusyError
count = pathlib.Path(sys.argv[1]) / "count"
done = 0
while done < 10:
    try:
        with RunFolder.create(pathlib.Path(sys.argv[1]), {}):
            number = int(count.read_text() or 0)
            time.sleep(0.0005)
            count.write_text(str(number + 1))
            done += 1
    except BusyError:
        pass
"""


def test_only_one_process_is_ever_inside(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    for racer in [python(RACE, tmp_path) for _ in range(3)]:
        with racer:
            assert racer.wait(timeout=300) == 0
    assert (tmp_path / "count").read_text() == "30"


def part(number: int) -> pa.Table:
    row = {"kind": "step", "tree": "plain", "rows": 1, "round": number}
    return records.table([row], records.TIMING_SCHEMA)


def test_parts_are_there_after_a_restart_and_gone_when_the_stage_is_done(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as folder:
        parts = folder.partial("stage", INPUTS)
        parts.write_table(10, part(10))
        parts.write_table(2, part(2))
        parts.write_json(2, {"tokens": 3})
    with RunFolder.create(tmp_path, CONFIG) as folder:
        parts = folder.partial("stage", INPUTS)
        assert parts.tables() == [2, 10]
        assert parts.values() == [2]
        assert parts.read_table(10, records.TIMING_SCHEMA).equals(part(10))
        assert parts.read_json(2) == {"tokens": 3}
        folder.write_json("result.json", 1)
        folder.mark_done("stage", INPUTS, ["result.json"])
        assert folder.partial("stage", INPUTS).tables() == []
        folder.finish({})
        folder.verify()
    assert names(tmp_path) == ["manifest.json", "result.json", "run.json"]


def test_parts_leave_a_complete_folder_complete(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as folder:
        folder.write_json("result.json", 1)
        folder.mark_done("stage", INPUTS, ["result.json"])
        folder.finish({})
        folder.partial("other", INPUTS).write_json(0, "part")
    RunFolder.open(tmp_path).verify()


class Ticking:
    """A clock that a test moves by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(parts_module, "perf_counter", lambda: self.now)


def test_the_seconds_of_an_interrupted_stage_add_up_as_far_as_its_parts_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ticking(monkeypatch)
    with RunFolder.create(tmp_path, CONFIG) as folder:
        parts = folder.partial("stage", INPUTS)
        clock.now += 7.0
        parts.write_json(0, "kept")
        clock.now += 40.0  # the part that it was at when it was killed
    clock.now += 1000.0
    with RunFolder.create(tmp_path, CONFIG) as folder:
        parts = folder.partial("stage", INPUTS)
        clock.now += 2.0
        parts.write_table(1, part(1))
        clock.now += 0.5
        folder.mark_done("stage", INPUTS, [])
        effort = folder.effort("stage")
    assert effort is not None
    assert (effort.seconds, effort.reused) == (9.5, False)


def test_seconds_of_parts_made_from_other_inputs_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ticking(monkeypatch)
    with RunFolder.create(tmp_path, CONFIG) as folder:
        parts = folder.partial("stage", INPUTS)
        clock.now += 7.0
        parts.write_json(0, "dropped")
        folder.partial("stage", INPUTS | {"model": "new"})
        clock.now += 2.0
        folder.mark_done("stage", INPUTS | {"model": "new"}, [])
        effort = folder.effort("stage")
    assert effort is not None
    assert effort.seconds == 2.0


def test_a_stage_of_an_earlier_process_is_reused_with_what_it_took(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as folder:
        folder.mark_done("stage", INPUTS, [], seconds=1.5)
        effort = folder.effort("stage")
        assert effort is not None
        assert (effort.seconds, effort.reused) == (1.5, False)
        assert effort.peak_bytes is not None
        assert 2**20 < effort.peak_bytes < 2**45
        assert folder.effort("other") is None
    with RunFolder.create(tmp_path, CONFIG) as folder:
        assert folder.effort("stage") == Effort(1.5, effort.peak_bytes, reused=True)


def test_a_run_of_an_earlier_version_noted_no_effort(tmp_path: Path) -> None:
    path = finished(tmp_path)
    run = json.loads((path / "run.json").read_text())
    for name in ("seconds", "peak_bytes"):
        del run["stages"]["stage"][name]
    edit(path / "run.json", **run)
    assert RunFolder.open(path).effort("stage") == Effort(None, None, reused=True)


def test_parts_made_from_other_inputs_are_dropped(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as folder:
        folder.partial("other", INPUTS).write_json(0, "kept")
        folder.partial("stage", INPUTS).write_json(0, "old")
        assert folder.partial("stage", INPUTS | {"model": "new"}).values() == []
        assert folder.partial("stage", INPUTS).values() == []
        assert folder.partial("other", INPUTS).read_json(0) == "kept"


WORK = """
import sys, pathlib, time
from entmtp_calib.artifacts import RunFolder
inputs = {"sum": "of squares"}
with RunFolder.create(pathlib.Path(sys.argv[1]), {"n": 12}) as folder:
    if not folder.is_done("sum", inputs):
        parts = folder.partial("sum", inputs)
        for number in range(12):
            if number not in parts.values():
                parts.write_json(number, number * number)
                print(number, flush=True)
                time.sleep(60 * (str(number) == sys.argv[2]))
        folder.write_json("sum.json", sum(parts.read_json(n) for n in parts.values()))
        folder.mark_done("sum", inputs, ["sum.json"])
    folder.finish({})
"""


def test_a_run_killed_at_any_part_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with python(WORK, whole, "none") as run:
        assert run.wait() == 0
    for stop in ("1", "5", "9"):
        with python(WORK, cut, stop) as run:
            assert run.stdout is not None
            while run.stdout.readline().strip() != stop:
                pass
            run.kill()
    (place,) = (cut / ".parts" / "sum").iterdir()
    (place / ".writing-1-000099.json").write_text("{")
    with python(WORK, cut, "none") as run:
        assert run.stdout is not None
        assert "9" not in run.stdout.read().split()
        assert run.wait() == 0
    assert (whole / "sum.json").read_bytes() == (cut / "sum.json").read_bytes()
    stages = [json.loads((path / "run.json").read_text())["stages"]["sum"] for path in (whole, cut)]
    assert stages[0]["outputs"] == stages[1]["outputs"]
    assert names(cut) == names(whole) == ["manifest.json", "run.json", "sum.json"]
    RunFolder.open(cut).verify()


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".writing-7-trace.parquet").write_bytes(b"PAR1")
    with RunFolder.create(tmp_path, CONFIG):
        assert names(tmp_path) == [".lock", "run.json"]

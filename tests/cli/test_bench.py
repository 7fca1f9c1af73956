"""`entmtp bench`: every method on the same texts; a fault of one costs the others nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from toy_bank import Built, Switching, run
from toy_heads import random_heads, save_for
from typer.testing import Result

from entmtp_calib import decoding, records
from entmtp_calib.bank import Bank
from entmtp_calib.heads.model import Heads
from entmtp_calib.stages import bench as stage
from entmtp_calib.stages import bench_run
from entmtp_calib.stages.peers import Peers
from entmtp_calib.targets.load import load_target

ALL = (
    "plain transformers prompt-lookup medusa-default hydra-default eagle2 "
    "static ladder hysteresis staged"
).split()
SIZE = ("--prompts", 3, "--max-new-tokens", 10)


@pytest.fixture(scope="session")
def medusa(switching: Switching, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = load_target(switching.model)
    heads = random_heads(target, kind="medusa", n_heads=4)
    return save_for(heads, target, tmp_path_factory.mktemp("medusa"))


def bench(switching: Switching, out: Path, *arguments: object) -> Result:
    return run(
        "bench", *switching.arguments, "--data", switching.data, *SIZE, "--out", out, *arguments
    )


def table(out: Path, name: str = "bench") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out / f"{name}.parquet").to_pylist()
    return rows


def by_method(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in rows}


def raise_at(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, n: int, error: Any) -> None:
    """Let the n-th call of a function raise, from 1."""
    original, calls = getattr(place, name), 0

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == n:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(place, name, counting)


def test_every_method_writes_plain_decodings_text(
    switching: Switching, medusa: Path, tmp_path: Path
) -> None:
    out, file = tmp_path / "out", tmp_path / "bench.json"
    result = bench(switching, out, "--rounds", 2, "--medusa-heads", medusa, "--json", file)
    assert result.exit_code == 0, result.output
    rows = table(out)
    assert [row["method"] for row in rows] == ALL
    assert all((row["texts"], row["divergences"], row["error"]) == (6, 0, None) for row in rows)
    assert all(row["tokens"] == row["tokens_compared"] == 60 for row in rows)
    document = json.loads(file.read_text())
    assert document["methods"] == rows
    assert document["lossless"] is True
    shown = [line.split()[0] for line in result.stdout.splitlines()[1 : len(ALL) + 1]]
    assert shown == ALL
    for prompt in document["prompts"]:
        assert prompt["id"] in result.stdout
    assert {row["switches"] for row in rows if row["method"] in ("transformers", "plain")} == {
        None,
        0,
    }


def test_figures_are_the_totals_of_the_timed_texts(
    switching: Switching, medusa: Path, tmp_path: Path
) -> None:
    result = bench(switching, tmp_path, "--rounds", 2, "--medusa-heads", medusa)
    assert result.exit_code == 0, result.output
    runs, rows = table(tmp_path, "bench_runs"), by_method(table(tmp_path))
    assert pq.read_schema(tmp_path / "bench_runs.parquet").equals(records.BENCH_RUNS_SCHEMA)
    assert pq.read_schema(tmp_path / "bench.parquet").equals(records.BENCH_SCHEMA)
    assert len(runs) == len(ALL) * 3 * 2
    total = {
        name: {
            key: sum(run[key] for run in runs if run["method"] == name)
            for key in ("tokens", "steps", "passes", "seconds", "decode_seconds")
        }
        for name in ALL
    }
    for name, row in rows.items():
        mine, rate = total[name], total[name]["tokens"] / total[name]["seconds"]
        assert row["tokens_per_second"] == pytest.approx(rate)
        assert row["mean_emitted_tokens"] == mine["tokens"] / mine["steps"]
        assert row["step_ms"] == pytest.approx(1000 * mine["decode_seconds"] / mine["passes"])
        for column, baseline in (("plain", "plain"), ("hydra_default", "hydra-default")):
            other = total[baseline]["tokens"] / total[baseline]["seconds"]
            assert row[f"ratio_to_{column}"] == pytest.approx(rate / other)
    for run_ in runs:
        assert run_["seconds"] >= run_["prefill_seconds"] + run_["decode_seconds"]
    assert rows["plain"]["mean_emitted_tokens"] == 1


def test_a_method_that_fails_spoils_no_other(
    switching: Switching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its warm-up and first prompt succeed.
    raise_at(monkeypatch, Peers, "generate", 3, RuntimeError("out of [bold] luck\nmore"))
    result = bench(switching, tmp_path, "--methods", "transformers,static")
    assert result.exit_code == 0, result.output
    rows = by_method(table(tmp_path))
    assert rows["transformers"]["error"] == "RuntimeError: out of [bold] luck"
    assert rows["transformers"]["tokens_per_second"] is None
    assert rows["transformers"]["texts"] == 1
    assert rows["static"]["tokens"] == rows["plain"]["tokens"] == 30
    assert rows["static"]["ratio_to_plain"] > 0
    line = next(row for row in result.stdout.splitlines() if row.startswith("transformers"))
    assert line.endswith("RuntimeError: out of [bold] luck")
    # A run with a fault is no result to come back to.
    again = bench(switching, tmp_path, "--methods", "transformers,static")
    assert again.exit_code == 0, again.output
    assert table(tmp_path)[1]["error"] is None


def test_a_failure_of_ours_exits_with_1_after_all_is_written(
    switching: Switching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_at(monkeypatch, Heads, "draft_level", 20, ZeroDivisionError())
    result = bench(switching, tmp_path, "--methods", "static")
    assert result.exit_code == 1, result.output
    plain, static = table(tmp_path)
    assert static["error"] == "ZeroDivisionError"
    assert plain["tokens"] == 30
    assert "token for token" not in result.stdout


def test_a_text_that_differs_exits_with_1_after_all_is_written(
    switching: Switching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_the_first_draft(parents: Any, tokens: Any, choices: Any) -> list[int]:
        return [1] if len(tokens) > 1 else []

    monkeypatch.setattr(decoding, "accept", accept_the_first_draft)
    out, file = tmp_path / "out", tmp_path / "bench.json"
    result = bench(switching, out, "--methods", "static", "--json", file)
    assert result.exit_code == 1, result.output
    assert "NOT lossless here: static\n" in result.stdout
    assert by_method(table(out))["static"]["divergences"] > 0
    assert json.loads(file.read_text())["lossless"] is False
    assert (out / "manifest.json").is_file()


def test_an_interrupted_run_goes_on_behind_its_finished_prompts(
    switching: Switching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--methods", "static,ladder")
    with monkeypatch.context() as patch:
        raise_at(patch, bench_run, "run_row", 3 + 2, KeyboardInterrupt())
        assert bench(switching, tmp_path, *arguments).exit_code == 130
    with monkeypatch.context() as patch:
        # Six texts of two prompts are left: the seventh call never comes.
        raise_at(patch, bench_run, "run_row", 7, AssertionError("the first prompt ran again"))
        result = bench(switching, tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    assert [row["texts"] for row in table(tmp_path)] == [3, 3, 3]


def test_a_finished_run_is_shown_again_without_running(
    switching: Switching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench(switching, tmp_path, "--methods", "static")
    raise_at(monkeypatch, bench_run, "run_row", 1, AssertionError("it ran again"))
    again = bench(switching, tmp_path, "--methods", "plain,static")  # the same in other words
    assert again.exit_code == 0, again.output
    assert (tmp_path / "manifest.json").is_file()
    assert again.stdout.splitlines()[:3] == first.stdout.splitlines()[:3]
    assert "measured earlier" in again.stdout


def test_trees_take_part_by_name(switching: Switching, tmp_path: Path) -> None:
    result = bench(switching, tmp_path, "--methods", "chain-2, none")
    assert result.exit_code == 0, result.output
    assert [row["method"] for row in table(tmp_path)] == ["plain", "chain-2", "none"]


def test_draws_are_compared_too_but_not_with_transformers(
    switching: Switching, tmp_path: Path
) -> None:
    sampled = ("--temperature", 1, "--seed", 3)
    result = bench(switching, tmp_path, *sampled, "--methods", "transformers,ladder")
    assert result.exit_code == 0, result.output
    assert [row["method"] for row in table(tmp_path)] == ["plain", "ladder"]
    assert "note     transformers takes no part: " in result.stdout


def test_the_prompts_are_the_banks_report_split(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("--max-new-tokens", 8, "--methods", "static,hydra-default,medusa-default")
    result = run("bench", built.folder, *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    report = Bank.load(built.folder).splits["report"]
    assert [prompt["id"] for prompt in document["prompts"]] == report
    assert document["origin"] == "of the bank's report split"
    # The bank's own heads are Medusa heads.
    assert [row["method"] for row in document["methods"]] == ["plain", "static", "medusa-default"]
    assert document["medusa_heads"] == document["heads"]
    place = Path(document["folder"])
    assert place.parent == Path("artifacts/bench/model/custom")
    assert (tmp_path / place / "bench.parquet").is_file()


def test_a_banks_own_folder_is_never_written_to(built: Built) -> None:
    before = (built.folder / "run.json").read_bytes()
    result = run("bench", built.folder, "--out", built.folder, "--methods", "static")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert (built.folder / "run.json").read_bytes() == before


def test_an_unknown_method_is_a_usage_error_before_anything_is_loaded(
    switching: Switching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_at(monkeypatch, stage, "open_session", 1, AssertionError("the model was loaded"))
    result = bench(switching, tmp_path, "--methods", "static,nope")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--methods nope" in result.stderr
    assert "hydra-default" in result.stderr
    unused = bench(switching, tmp_path, "--methods", "static", "--medusa-heads", "heads")
    assert unused.exit_code == 2
    assert "--medusa-heads" in unused.stderr


@pytest.mark.parametrize(
    "flag", ["--prompts=0", "--rounds=0", "--max-new-tokens=0", "--temperature=-1", "--methods="]
)
def test_a_value_that_can_never_work_is_a_usage_error(flag: str) -> None:
    result = run("bench", "no/bank", flag)
    assert result.exit_code == 2
    assert flag.split("=")[0] in result.stderr


def test_typical_acceptance_is_labelled_and_scored(switching: Switching, tmp_path: Path) -> None:
    chosen = ("--methods", "static,eagle2", "--temperature", 0.7, "--acceptance", "typical")
    result = bench(switching, tmp_path, *chosen, "--json", tmp_path / "b.json")
    assert result.exit_code == 0, result.output
    assert "NOT lossless" in result.stdout
    assert "plain decoding's, token for token" not in result.stdout
    assert json.loads((tmp_path / "b.json").read_text())["lossless"] is False
    rows = by_method(table(tmp_path))
    assert rows["plain"]["nll_difference"] == 0
    assert rows["static"]["nll"] > 0
    greedy = bench(switching, tmp_path / "greedy", "--acceptance", "typical")
    assert greedy.exit_code == 2

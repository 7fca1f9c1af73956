"""`entmtp simulate` on banks that the command line built, and on files that are no cost tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import toys
from recorded_run import save_costs, timing_rows
from toy_bank import SMALL, Built, run, write_prompts
from toy_heads import random_heads, save_for

from entmtp_calib.targets.load import load_target

ROOT = Path(__file__).parents[2]
PREDICTED = (
    "tokens_per_second_predicted",
    "oracle_tokens_per_second",
    "feature_bound_tokens_per_second",
    "capture",
)
COUNTED = ("emitted_tokens", "steps", "mean_emitted_tokens", "switches", "share")


@pytest.fixture(scope="module")
def unsure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of RAND with random heads, whose texts are hard to tell ahead."""
    folder = tmp_path_factory.mktemp("unsure")
    model = toys.save_rand(folder / "model")
    target = load_target(model)
    heads = save_for(random_heads(target), target, folder / "heads")
    data = write_prompts(folder / "prompts.jsonl", [f"t{n}" for n in range(8)], 9)
    arguments = [*SMALL, "--model", model, "--heads", heads, "--data", data]
    result = run("build-bank", *arguments, "--out", folder / "run")
    assert result.exit_code == 0, result.output
    return folder / "run"


def document(*arguments: object) -> Any:
    result = run("simulate", *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["built", "unsure"])
def test_under_its_own_costs_a_bank_is_predicted_exactly_as_when_it_was_built(
    name: str, request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue(name)
    folder = made.folder if isinstance(made, Built) else made
    shown = document(folder)
    reported = pq.read_table(folder / "policies.parquet").to_pylist()
    assert [row["policy"] for row in shown["policies"]] == [row["policy"] for row in reported]
    for mine, row in zip(shown["policies"], reported, strict=True):
        assert {key: mine[key] for key in PREDICTED} == {key: row[key] for key in PREDICTED}
        # What ran live took the very steps that replay counts.
        assert {key: mine[key] for key in COUNTED} == {key: row[key] for key in COUNTED}
    assert shown["refit"] is None


def test_the_table_has_figures_bounds_and_conditions(built: Built) -> None:
    result = run("simulate", built.folder)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["plain", "static", "ladder", "hysteresis"]
    for words in (
        "upper bounds",
        "2 prompts of the report split, 24 positions",
        "costs  timing.parquet (",
        f"bank   {built.folder}",
        f"9 prompts from {built.arguments[-1]}",
    ):
        assert words in result.stdout
    assert "fitted to these costs" not in result.stdout


def test_other_costs_are_fitted_anew(built: Built, tmp_path: Path) -> None:
    dear = save_costs(tmp_path / "[/dear]", timing_rows(row_ms=90.0))
    result = run("simulate", built.folder, "--costs", dear, "--json", tmp_path / "dear.json")
    assert result.exit_code == 0, result.output
    assert "policy static      always plain (changed)" in result.stdout
    assert f"costs  {dear}, at " in result.stdout
    shown = json.loads((tmp_path / "dear.json").read_text(encoding="utf-8"))
    static = shown["refit"]["policies"][0]
    assert static["share"] == [{"tree": "plain", "share": 1.0}]
    assert static["fitted"] == {
        "name": "static",
        "index": list(shown["refit"]["trees"]).index("plain"),
    }
    assert static["ratio_to_bank"] > 1
    assert "static" in shown["refit"]["changed"]


def test_another_split_says_that_policies_were_fitted_on_it(built: Built) -> None:
    result = run("simulate", built.folder, "--split", "search")
    assert "3 prompts of the search split, 36 positions" in result.stdout
    assert "note   policies were fitted on the search split" in result.stdout


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read"),
        (b"no table", "not Parquet"),
        ("trace.parquet", "other columns"),
        ("steps", "0 timed levels"),
    ],
)
def test_a_file_that_is_no_cost_table_is_one_line(
    built: Built, tmp_path: Path, content: Any, problem: str
) -> None:
    file = tmp_path / "[red]costs"
    if content == "steps":
        save_costs(file, timing_rows(1.0)[:3])
    elif isinstance(content, str):
        file.write_bytes((built.folder / content).read_bytes())
    elif content:
        file.write_bytes(content)
    result = run("simulate", built.folder, "--costs", file)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    for words in (problem, str(file), "name the timing.parquet or costs.parquet"):
        assert words in result.stderr


@pytest.mark.parametrize(
    "flags", [("--split", "train"), ("--signal", "luck"), ("--signal", "chain_value:9")]
)
def test_a_value_that_can_never_work_is_a_usage_error(built: Built, flags: tuple[str, ...]) -> None:
    result = run("simulate", built.folder, *flags)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert " ".join(flags) in result.stderr


@pytest.mark.parametrize("command", ["simulate", "signals"])
def test_a_folder_without_a_run_is_one_line(command: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "[/y]"):
        result = run(command, folder)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert str(folder) in result.stderr


@pytest.mark.parametrize("command", ["simulate", "signals"])
def test_a_recorded_run_needs_neither_torch_nor_transformers(command: str, built: Built) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers'): sys.modules[name] = None\n"
        "from cli.main import app\n"
        "app(sys.argv[1:])\n"
    )
    arguments = [sys.executable, "-c", code, command, str(built.folder)]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "24 positions" in result.stdout

"""`entmtp build-bank`: what it shows is what it wrote, and again it does nothing twice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import toys
from toy_bank import SMALL, Built, run, write_prompts
from toy_heads import random_heads, save_for

from cli import outcome
from entmtp_calib import records
from entmtp_calib.artifacts import RunFolder
from entmtp_calib.bank import Bank
from entmtp_calib.decoding import Decoder
from entmtp_calib.policy import Static
from entmtp_calib.stages.build_bank import Outcome
from entmtp_calib.targets.load import load_target

SCHEDULE = {"static", "ladder", "hysteresis", "staged"}


def test_the_run_is_complete_and_all_its_figures_are_shown(built: Built) -> None:
    folder = RunFolder.open(built.folder)
    folder.verify()
    bank = Bank.load(built.folder)
    lines = [line.split() for line in built.stdout.splitlines() if line]
    assert {line[0] for line in lines if line[-1] == "yes"} == {tree.id for tree in bank.frontier}
    shown = {line[0] for line in lines}
    assert shown >= {"plain", "hydra-default", *SCHEDULE}
    # Perfect heads, four deep: 12 tokens in 3 steps. Timing decides which other trees are shown.
    row = next(line for line in lines if line[0] == "hydra-default")
    assert row[:7] == ["hydra-default", "63", "4", "4.000", "[4.000,", "4.000]", "3.000"]
    data = built.arguments[-1]
    assert f"data        9 prompts from {data} (9 rows read)\n" in built.stdout
    assert built.stdout.endswith(f"run folder  {built.folder}\n")


def test_json_has_what_the_screen_has(built: Built) -> None:
    document = json.loads(built.document.read_text(encoding="utf-8"))
    bank = Bank.load(built.folder)
    assert [tree["id"] for tree in document["trees"] if tree["in_bank"]] == [
        tree.id for tree in bank.frontier
    ]
    assert document["folder"] == str(built.folder)
    assert {row["policy"] for row in document["policies"]} >= {"plain", *bank.policies}
    described = [*document["bank"]["trees"], *document["bank"]["extra_trees"]]
    assert [tree["paths"] for tree in described] == [tree.to_list() for tree in bank.trees]
    assert document["bank"]["auto"] == bank.auto


def test_every_policy_is_fitted_and_judged_on_texts_it_was_not_fitted_on(built: Built) -> None:
    bank = Bank.load(built.folder)
    assert set(bank.policies) == SCHEDULE
    assert bank.auto in SCHEDULE
    assert bank.policies["static"] == Static(bank.best)
    assert len(bank.notes) == len(SCHEDULE)
    rows = {
        row["policy"]: row
        for row in RunFolder.open(built.folder)
        .read_table("policies.parquet", records.POLICIES_SCHEMA)
        .to_pylist()
    }
    assert list(rows) == ["plain", *bank.policies, "hydra-default"]
    for name, row in rows.items():
        assert row["emitted_tokens"] == 24  # two report prompts of twelve
        assert sum(share["share"] for share in row["share"]) == pytest.approx(1.0)
        measured = [value for key, value in row.items() if key != "capture"]
        assert None not in measured, name
        assert row["tokens_per_second_predicted"] <= row["feature_bound_tokens_per_second"]
    for name, ratio in (("plain", "plain"), ("static", "static"), ("hydra-default", "hydra")):
        assert rows[name][f"ratio_to_{ratio}"] == pytest.approx(1.0)
    # Perfect heads: the replayed steps are the live ones.
    for name, policy in bank.policies.items():
        if isinstance(policy, Static):
            depth = bank.trees[policy.index].depth
            assert rows[name]["mean_emitted_tokens"] == pytest.approx(12 / -(-12 // (depth + 1)))


def test_the_costs_are_kept_apart_and_stand_in_the_timing_table(built: Built) -> None:
    folder = RunFolder.open(built.folder)
    costs, timing = (
        folder.read_table(name, records.TIMING_SCHEMA).to_pylist()
        for name in ("costs.parquet", "timing.parquet")
    )
    assert {row["kind"] for row in costs} == {"step", "level"}
    assert timing[: len(costs)] == costs
    live = folder.read_table("live.parquet", records.TIMING_SCHEMA).to_pylist()
    assert timing[len(costs) :] == live  # with one round nothing else is timed
    assert {row["kind"] for row in live} == {"end_to_end"}


def test_a_signal_that_cannot_be_is_one_line_before_anything_is_loaded(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    for name in ("load_prompts", "load_target"):
        monkeypatch.setattr(f"entmtp_calib.stages.setup.{name}", refuse)
    for signal, reason in (
        ("luck", "signal 'luck' is not one of chain_value"),
        ("chain_value:5", "a depth of at most 4, that of the heads"),
    ):
        arguments = [*built.arguments, "--signal", signal, "--out", tmp_path / "run"]
        result = run("build-bank", *arguments)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
        assert f"--signal {signal}" in result.stderr
        assert reason in result.stderr
        assert not (tmp_path / "run").exists()


def test_the_command_is_recorded(built: Built) -> None:
    manifest = json.loads((built.folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["provenance"]["command"].startswith("entmtp")


def test_the_same_command_again_computes_nothing(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a finished stage ran again")

    made = [*built.folder.glob("*.parquet"), built.folder / "bank.safetensors"]
    before = {path: path.stat().st_mtime_ns for path in made}
    monkeypatch.setattr(Decoder, "generate", refuse)
    result = run("build-bank", *built.arguments, "--out", built.folder)
    assert result.exit_code == 0, result.output
    assert without_usage(result.stdout) == without_usage(built.stdout)
    assert before == {path: path.stat().st_mtime_ns for path in made}


def without_usage(shown: str) -> str:
    """All that is shown but the seconds of the stages and the memory."""
    assert len(re.findall(r"^stage .*?^memory .*?\n", shown, flags=re.S | re.M)) == 1
    return re.sub(r"^stage .*?^memory .*?\n", "", shown, flags=re.S | re.M)


STAGES = ("load", "rollout", "grow", "cost", "recalibrate", "time", "select", "report")


def test_the_end_says_where_the_time_went_and_so_does_show_later(built: Built) -> None:
    usage = json.loads(built.document.read_text(encoding="utf-8"))["usage"]
    assert [stage["stage"] for stage in usage["stages"]] == list(STAGES)
    assert not any(stage["reused"] for stage in usage["stages"])
    seconds = [stage["seconds"] for stage in usage["stages"]]
    assert min(seconds) > 0
    assert usage["seconds"] == pytest.approx(sum(seconds))
    target = load_target(built.arguments[built.arguments.index("--model") + 1])
    assert usage["target_bytes"] == 4 * target.facts.n_weights
    assert usage["peak_bytes"] > 2**25  # Python and torch alone have more
    lines = [line.split() for line in built.stdout.splitlines()]
    start = lines.index(["stage", "seconds"])
    table = [[name, f"{taken:.1f}"] for name, taken in zip(STAGES, seconds, strict=True)]
    assert lines[start + 1 :][: len(STAGES)] == table
    assert lines[start + 1 + len(STAGES)] == ["total", f"{usage['seconds']:.1f}"]
    memory = (
        f"memory      {usage['peak_bytes'] / 1e6:.1f} MB resident at most; the target's weights"
    )
    assert memory in built.stdout


def test_a_stage_that_was_done_before_is_marked_and_counts_with_what_it_took(built: Built) -> None:
    """Whatever was run in this folder since, the seconds are those of the work."""
    first = json.loads(built.document.read_text(encoding="utf-8"))["usage"]
    result = run("build-bank", *built.arguments, "--out", built.folder)
    again = run("build-bank", *built.arguments, "--out", built.folder, "--json", "-")
    usage = json.loads(again.stdout)["usage"]
    assert usage["stages"][1:] == [{**stage, "reused": True} for stage in first["stages"][1:]]
    assert usage["stages"][0]["reused"] is False
    assert usage["peak_bytes"] >= first["peak_bytes"]
    marked = [line.split()[0] for line in result.stdout.splitlines() if "done before" in line]
    assert marked == list(STAGES[1:])
    manifest = json.loads((built.folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["provenance"]["usage"] == usage
    shown, document = run("show", built.folder), run("show", built.folder, "--json", "-")
    assert "done before" not in shown.stdout
    assert re.search(r"^report +\d+\.\d$", shown.stdout, flags=re.M)
    assert "MB resident at most" in shown.stdout
    assert json.loads(document.stdout)["usage"] == usage


def test_where_no_tree_is_faster_the_summary_says_so(
    built: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    bank = replace(Bank.load(built.folder), best=0)
    outcome.present(Outcome(built.folder, "prompts [/b]", "select", bank), None)
    shown = capsys.readouterr().out
    assert "no grown tree is faster than plain decoding beyond doubt" in shown
    assert "prompts [/b]" in shown


def changed(arguments: object, flag: str, value: object) -> list[object]:
    """The arguments with another value of one flag."""
    words = list(arguments)  # type: ignore[call-overload]
    words[words.index(flag) + 1] = value
    return words


def one_line(reason: str, *arguments: object) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.output
    assert reason in result.stderr
    assert result.stdout == ""


def test_data_that_cannot_be_used_is_one_line(built: Built, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    few = write_prompts(tmp_path / "few.jsonl", ["t1", "t2"], 3)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "t1 t2"}\n{"question": "t3"}\n')
    for data, reason in (
        (tmp_path / "[/y].jsonl", "[/y].jsonl does not exist"),
        (empty, "empty.jsonl is empty"),
        (few, "3 distinct prompts are available in"),
        (other, "row 2"),
    ):
        one_line(reason, "build-bank", *changed(built.arguments, "--data", data))
    assert run("build-bank", "--task", "custom").exit_code == 2


def test_a_model_or_heads_that_cannot_be_used_are_one_line(built: Built, tmp_path: Path) -> None:
    target = load_target(toys.save_rand(tmp_path / "rand"))
    foreign = save_for(random_heads(target), target, tmp_path / "foreign")
    for flag, value, reason in (
        ("--model", tmp_path / "[/y]", "[/y]' was not found"),
        ("--heads", tmp_path / "nothing", "nothing is missing"),
        ("--heads", foreign, "was made for the target rand"),
    ):
        one_line(reason, "build-bank", *changed(built.arguments, flag, value))


def test_a_folder_that_cannot_be_used_is_one_line(built: Built, tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "busy", {}):
        one_line("in use by process", "build-bank", *built.arguments, "--out", tmp_path / "busy")
    (tmp_path / "file").touch()
    one_line("a file is in the way", "build-bank", *built.arguments, "--out", tmp_path / "file")


def test_a_prompt_longer_than_the_limit_is_dropped_and_counted(built: Built) -> None:
    arguments = [*built.arguments, "--max-prompt-tokens", "4"]
    one_line("6 dropped: longer than 4 tokens", "build-bank", *arguments)


def test_the_small_sizes_are_those_of_the_run(built: Built) -> None:
    settings = RunFolder.open(built.folder).config["settings"]
    assert settings["context_lengths"] == [8]
    assert settings["max_nodes"] == int(SMALL[SMALL.index("--max-nodes") + 1])

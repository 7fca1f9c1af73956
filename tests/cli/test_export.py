"""`entmtp export`: the file alone on stdout or in FILE, all else said on stderr."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_run import save_costs, save_run, text_trace, timing_rows
from toy_bank import BUSHY, Built, run

from entmtp_calib.bank import Bank
from entmtp_calib.formats.chains import SglangNumbers
from entmtp_calib.formats.engines import FORMS
from entmtp_calib.formats.reading import read
from entmtp_calib.policy import Static
from entmtp_calib.tree import EMPTY, Tree, chain

ROOT = Path(__file__).parents[2]
SMALL = Tree.of([[0], [1], [0, 0]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "[red]run"
    trees, policies = [EMPTY, SMALL, chain(2)], {"static": Static(1)}
    return save_run(folder, text_trace(), trees, policies, timing_rows(1.0))


def test_the_file_is_alone_on_stdout_and_each_note_is_a_line_on_stderr(folder: Path) -> None:
    result = run("export", folder, "--format", "medusa")
    assert (result.exit_code, result.stdout) == (0, "[[0], [1], [0, 0]]\n")
    lines = result.stderr.splitlines()
    assert all(line.startswith("note: ") for line in lines)
    assert lines[0] == "note: read by Medusa and Hydra: all"


def test_a_tree_of_the_bank_goes_into_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "[/b].yml"
    result = run("export", folder, "--format", "trtllm-bench", "--tree", "2", "--out", file)
    assert (result.exit_code, result.stdout) == (0, "")
    assert read(file.read_bytes(), "file")[0].tree == chain(2)
    assert "note: tree chain-2: 2 nodes, depth 2" in result.stderr


def test_the_costs_of_the_serving_machine_decide_the_closest_fit(
    folder: Path, tmp_path: Path
) -> None:
    dear = save_costs(tmp_path / "[/dear]", timing_rows(row_ms=40.0))
    result = run("export", folder, "--format", "sglang", "--costs", dear)
    assert result.stdout.startswith("--speculative-num-steps 1 --speculative-eagle-topk 1 ")
    assert f"under {dear}" in result.stderr


@pytest.fixture(scope="module")
def measured(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that build-bank wrote, with a tree that drafts in its bank in any case."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    shutil.copytree(built.folder, folder)
    bank = Bank.load(folder)
    extra = replace(bank.entries[0], tree=BUSHY)
    replace(bank, extras=(*bank.extras, extra)).save(folder / "bank.safetensors")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_build_bank_wrote_is_exported_in_every_form(
    form: str, measured: Path, tmp_path: Path
) -> None:
    cheap = save_costs(tmp_path / "costs.parquet", timing_rows(row_ms=0.1, level_ms=0.1))
    arguments = ["--format", form, "--tree", BUSHY.id, "--costs", cheap, "--out", tmp_path / "file"]
    result = run("export", measured, *arguments)
    assert result.exit_code == 0, result.output
    data = (tmp_path / "file").read_bytes()
    if form == "sglang":  # which may have found a branching shape, and that is no tree
        assert SglangNumbers.parse(data.decode())
    else:
        assert read(data, "file")[0].tree in (BUSHY, chain(1), chain(2), chain(3))


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("--format", "gguf"), 2, "--format gguf; expected one of medusa"),
        (("--format", "sequoia"), 2, "--format sequoia, a binary file; expected --out FILE"),
        (("--format", "medusa", "--tree", "oak"), 1, "the bank has no tree 'oak'"),
        (("--format", "medusa", "--tree", "plain"), 1, "tree plain drafts nothing"),
        (("--format", "sglang", "--costs", "no/such/file"), 1, "cannot read no/such/file"),
        (("--format", "medusa", "--out", "/proc/no/file"), 1, "cannot write /proc/no/file"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    arguments: tuple[str, ...], exit_code: int, words: str, folder: Path
) -> None:
    result = run("export", folder, *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (exit_code, "", 1)
    assert words in result.stderr


def test_a_form_is_asked_for(folder: Path) -> None:
    assert run("export", folder).exit_code == 2


@pytest.mark.parametrize("form", ["medusa", "vllm-schedule", "sglang", "sglang-adaptive"])
def test_export_needs_neither_torch_nor_transformers(form: str, folder: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers'): sys.modules[name] = None\n"
        "from cli.main import app\n"
        "app(sys.argv[1:])\n"
    )
    arguments = [sys.executable, "-c", code, "export", str(folder), "--format", form]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_help_names_every_form_and_shows_examples() -> None:
    text = run("export", "--help").stdout
    assert all(form in text for form in FORMS)
    assert "  entmtp export RUN --format trtllm-bench --out medusa.yml\n" in text


def test_an_adaptive_file_is_strict_json(folder: Path) -> None:
    document = json.loads(run("export", folder, "--format", "sglang-adaptive").stdout)
    assert document["candidate_steps"] == [2]

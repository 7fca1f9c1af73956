"""`entmtp explain`: tables, sentences and JSON, on a run made by hand and on one that was built."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recorded_run import save_costs, save_run, text_trace, timing_rows
from toy_bank import Built, run

from entmtp_calib.policy import Static
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, MEDUSA2_DEFAULT, Tree, chain

ROOT = Path(__file__).parents[2]
GROWN = Tree.of([(0,), (1,), (0, 0)])
TREES = [EMPTY, chain(1), GROWN]
HYDRA_NODE = re.compile(r"^[├└│ ]+─ [\d,]+ .*$", flags=re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained") / "[red]run"
    policies = {"static": Static(2)}
    return save_run(folder, text_trace(n_heads=4), TREES, policies, timing_rows(2.0))


def document(*arguments: object) -> Any:
    result = run("explain", *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=lambda word: pytest.fail(word))


def test_a_bank_is_a_table_and_two_of_its_trees_node_by_node(folder: Path) -> None:
    result = run("explain", folder)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    names = ["plain", "chain-1", GROWN.id, "hydra-default", "medusa2-default"]
    assert [line.split()[0] for line in lines[1:6]] == names
    assert lines[3].split()[:4] == [GROWN.id, "*", "3", "2"]
    sentences = [line for line in lines if line.endswith(".") and " a step" in line]
    assert [line.split()[0] for line in sentences] == [GROWN.id, "hydra-default"]
    headings = [line.split(",")[0] for line in lines if line.endswith(" passes:")]
    assert headings == [GROWN.id, "hydra-default"]
    for words in (
        "├─ 0 ",
        "│  └─ 0,0 ",
        "└─ 1 ",
        "51 more, each accepted by at most ",
        "(--all shows them)",
        "never pays",
        "texts  3 prompts of the report split",
        f"bank   {folder}",
    ):
        assert words in result.stdout


def test_the_nodes_of_a_tree_are_added_up_by_depth_and_by_how_many_are_kept(folder: Path) -> None:
    lines = [line.split() for line in run("explain", folder, "hydra-default").stdout.splitlines()]
    hydra = document(folder)["trees"][3]
    at = lines.index(["depth", "nodes", "never", "pay", "marginal", "conditional"])
    depths = lines[at + 1 : lines.index([], at)]
    assert [row[:2] for row in depths] == [["1", "10"], ["2", "28"], ["3", "23"], ["4", "2"]]
    assert sum(int(row[2]) for row in depths) == hydra["never_pay"]
    assert [row[3] for row in depths] == [f"{rate:.3f}" for rate in hydra["marginal"]]
    at = lines.index("most accepted nodes alone emitted/step step ms tokens/s".split())
    parts = lines[at + 1 : lines.index([], at)]
    best = len(hydra["best_part"]["paths"])
    alone = hydra["most_accepted_alone"]
    assert [int(row[0]) for row in parts] == sorted({0, 1, 2, 4, 8, 16, 32, 63, best})
    for row in parts:
        figures = [cell for cell in row[1:] if cell.replace(".", "").isdigit()]
        part = alone[int(row[0])]
        assert figures[0] == f"{part['mean_emitted_tokens']:.3f}"
        assert figures[2] == f"{part['tokens_per_second']:.2f}"
        assert (row[-1] == "fastest") == (int(row[0]) == best)
    fastest = max(part["tokens_per_second"] for part in alone)
    assert hydra["best_part"]["tokens_per_second"] == fastest
    assert alone[-1]["tokens_per_second"] == hydra["tokens_per_second"]


def test_all_shows_every_node(folder: Path) -> None:
    few, everything = (run("explain", folder, "hydra-default", *f).stdout for f in ((), ("--all",)))
    assert (len(HYDRA_NODE.findall(few)), len(HYDRA_NODE.findall(everything))) == (12, 63)
    assert "--all shows them" not in everything


def test_the_nodes_on_screen_are_the_most_accepted_ones_and_a_tree(folder: Path) -> None:
    hydra = document(folder)["trees"][3]
    text = run("explain", folder, "hydra-default").stdout
    labels = [line.split("─ ")[1].split()[0] for line in HYDRA_NODE.findall(text)]
    shown = {tuple(map(int, label.split(","))) for label in labels}
    rates = {tuple(node["path"]): node["accepted"] for node in hydra["nodes"]}
    assert min(rates[path] for path in shown) >= max(
        rate for path, rate in rates.items() if path not in shown
    )
    assert Tree.of(shown).n_nodes == 12


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("medusa-default", HYDRA_DEFAULT),
        ("medusa2-default", MEDUSA2_DEFAULT),
        ("chain-2", chain(2)),
        ("[[0], [1], [0, 0]]", GROWN),
        ("1", chain(1)),
    ],
)
def test_a_tree_is_named_in_many_ways(name: str, tree: Tree, folder: Path) -> None:
    result = run("explain", folder, name)
    assert result.exit_code == 0, result.output
    assert f"\n{tree.id}, " in result.stdout


def test_a_file_as_import_trees_reads_it_is_explained(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "[id].py"
    file.write_text("mine = [(0,), (1,), (0, 2)]\n")
    result = run("explain", folder, file)
    assert result.exit_code == 0, result.output
    assert f"mine ({Tree.of([(0,), (1,), (0, 2)]).id})  " in result.stdout
    assert "\nmine, " in result.stdout


def test_the_json_has_every_node_of_every_tree(folder: Path, tmp_path: Path) -> None:
    shown = document(folder)
    assert (shown["best"], shown["split"], shown["notes"]) == (GROWN.id, "report", [])
    assert [len(tree["nodes"]) for tree in shown["trees"]] == [0, 1, 3, 63, 63]
    grown = shown["trees"][2]
    assert [tuple(node["path"]) for node in grown["nodes"]] == list(GROWN.paths)
    for node in grown["nodes"]:
        added = node["within"]["mean_emitted_tokens"] - node["without"]["mean_emitted_tokens"]
        assert node["adds_emitted_tokens"] == pytest.approx(added)
        assert node["accepted"] == pytest.approx(node["reached"] * node["conditional"])
    assert sum(node["never_pays"] for node in grown["nodes"]) == grown["never_pay"]
    by_depth = [sum(n["accepted"] for n in grown["nodes"] if len(n["path"]) == d) for d in (1, 2)]
    assert grown["marginal"] == pytest.approx(by_depth)
    assert grown["plain_low"] < grown["ratio_to_plain"] < grown["plain_high"]
    assert grown["best_part"]["paths"]
    run("explain", folder, "--json", tmp_path / "file.json")
    assert json.loads((tmp_path / "file.json").read_text(encoding="utf-8")) == shown


def test_other_costs_and_another_split_are_named(folder: Path, tmp_path: Path) -> None:
    few = save_costs(tmp_path / "[/few]", timing_rows(1.0, most_rows=8))
    result = run("explain", folder, "--costs", few, "--split", "search")
    assert result.exit_code == 0, result.output
    assert f"costs  {few}, at " in result.stdout
    assert "note   the bank's trees were found on the search split" in result.stdout
    assert "note   the costs do not reach a step with hydra-default" in result.stdout
    hydra = document(folder, "--costs", few)["trees"][3]
    for name in ("step_ms", "tokens_per_second", "ratio_to_plain", "never_pay"):
        assert hydra[name] is None
    assert all(node["never_pays"] is None for node in hydra["nodes"])


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("--split", "train"), 2, "--split train"),
        (("oak",), 1, "the bank has no tree 'oak'"),
        (("x" * 5000,), 1, "the bank has no tree"),
        (("[[0], [1, 1]]",), 1, "parent missing of [1, 1]"),
        (("chain-5",), 1, "tree chain-5 has depth 5; expected at most 4"),
        (("--costs", "no/such/file"), 1, "cannot read no/such/file"),
    ],
)
def test_what_cannot_be_explained_is_one_line(
    arguments: tuple[str, ...], exit_code: int, words: str, folder: Path
) -> None:
    result = run("explain", folder, *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (exit_code, "", 1)
    assert words in result.stderr


def test_a_run_that_was_built_is_explained_without_torch(built: Built) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers'): sys.modules[name] = None\n"
        "from cli.main import app\n"
        "app(sys.argv[1:])\n"
    )
    arguments = [sys.executable, "-c", code, "explain", str(built.folder)]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "hydra-default verifies 64 rows a pass" in result.stdout
    assert "24 positions" in result.stdout


def test_the_help_shows_examples() -> None:
    text = run("explain", "--help").stdout
    assert "  entmtp explain RUN hydra-default --all\n" in text
    assert "medusa2-default" in text

"""The README says what is true: its commands exist, its sizes are the code's, its files exist."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import typer.main

from cli.main import app
from entmtp_calib.config import build_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", README, flags=re.S))
COMMANDS = [line.split("#")[0].strip() for line in BLOCKS.splitlines() if line.strip()]
INLINE = re.findall(r"`((?:entmtp|make) [^`]+)`", README)


@pytest.mark.parametrize(
    "line", sorted({c for c in [*COMMANDS, *INLINE] if c.startswith("entmtp ")})
)
def test_every_command_and_option_exists(line: str) -> None:
    group = typer.main.get_command(app)
    _, name, *arguments = shlex.split(line)
    command = group.commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    used = {argument for argument in arguments if argument.startswith("--")}
    assert used <= known, used - known


@pytest.mark.parametrize("line", sorted({c for c in [*COMMANDS, *INLINE] if c.startswith("make ")}))
def test_every_make_target_exists(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target, *variables = shlex.split(line)[1:]
    assert re.search(rf"^{target}:", makefile, flags=re.M)
    for variable in variables:
        assert re.search(rf"^{variable.split('=')[0]} \?=", makefile, flags=re.M)


def test_the_first_screen_gives_the_two_commands() -> None:
    assert {"make bank", "make test"} <= set(COMMANDS[:2])


@pytest.mark.parametrize("preset", ["quick", "default", "paper"])
def test_the_presets_are_the_codes(preset: str) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| `{preset}`"))
    _, sizes, tokens, live = (cell.strip() for cell in row.strip("|").split("|")[:4])
    config = build_config(preset)
    expected = f"{config.search_prompts} / {config.select_prompts} / {config.report_prompts}"
    assert (sizes, tokens) == (expected, str(config.max_new_tokens))
    assert live == (str(config.max_candidates) if config.max_candidates else live)
    assert bool(config.max_candidates) != (live == "the whole acceptance frontier")


def test_every_part_on_the_map_is_there() -> None:
    table = README[README.index("| where | what |") :].split("\n\n")[0]
    names = re.findall(r"`(\w+/?)`", table)
    library = ROOT / "entmtp_calib"
    missing = [
        n for n in names if not (library / n).is_dir() and not (library / f"{n}.py").is_file()
    ]
    assert not missing
    modules = {path.stem for path in library.glob("*.py")} - {"__init__"}
    assert modules <= {name.strip("/") for name in names}


def test_the_readmes_python_is_that_of_the_examples() -> None:
    examples = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert blocks
    for block in blocks:
        inside = textwrap.indent(block, "    ")
        assert any(inside in example for example in examples), block


def test_the_tests_of_ci_are_the_readmes() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")

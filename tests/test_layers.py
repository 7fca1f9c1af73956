"""The order of the layers, and a command line that starts without the heavy packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "entmtp_calib"

# A module imports only from what stands above it; a package counts as one layer.
LAYERS = """
    errors progress config tree records
    topology acceptance transfer largest sampling signals policy trace decisions walks replay costs
    task staging fitting prediction frontier growth
    timing racing provenance files locks parts formats ablation artifacts prompts targets heads bank
    plan drafting dynamic steps decoding
    stages generate
""".split()

NO_TORCH = set(
    """
    errors progress config tree records topology acceptance signals policy trace decisions walks
    replay costs task staging fitting prediction frontier growth provenance files locks parts
    formats ablation artifacts bank steps
    """.split()
)
HEAVY = {"torch", "transformers", "datasets", "pandas"}

MODULES = sorted(LIBRARY.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


def imported(path: Path, only_at_load: bool = False) -> set[str]:
    """Full names of the modules that a file imports, anywhere or only when it is loaded."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in _at_load(tree) if only_at_load else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _at_load(node: ast.AST) -> list[ast.AST]:
    """All nodes that run on import: no function bodies, nothing that is for type checkers only."""
    found = [node]
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not for_types:
            found += _at_load(child)
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_stands_above_it(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":
        allowed = set()
    else:
        assert layer in LAYERS, f"{name_of(path)} has no place in the order of the layers"
        in_a_package = path.parent != LIBRARY
        allowed = set(LAYERS[: LAYERS.index(layer) + in_a_package])
    used = {name.split(".")[1] for name in imported(path) if name.startswith("entmtp_calib.")}
    assert used <= allowed, f"{name_of(path)} imports {sorted(used - allowed)} from below"


def test_every_layer_exists() -> None:
    assert {layer_of(path) for path in MODULES} - {"__init__"} == set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_library_does_not_know_the_command_line(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path)}
    assert not tops & {"cli", "typer", "rich", "click"}


@pytest.mark.parametrize(
    "path", [path for path in MODULES if layer_of(path) in NO_TORCH], ids=name_of
)
def test_values_and_mathematics_load_without_torch(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported(path, only_at_load=True)} & HEAVY


def run_fresh(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter in which importing a heavy package fails."""
    forbid = f"import sys\nfor name in {sorted(HEAVY)}: sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", forbid + code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_help_of_every_command_needs_no_heavy_package() -> None:
    code = """
import typer
from typer.testing import CliRunner
from cli.main import app

commands = typer.main.get_command(app).commands
for arguments in [["--help"], *([name, "--help"] for name in commands)]:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, (arguments, result.output)
    print(arguments)
"""
    result = run_fresh(code)
    assert result.returncode == 0, result.stderr
    assert "show" in result.stdout


def test_importing_the_command_line_loads_no_heavy_package() -> None:
    code = "import sys, cli.main; print(sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(ast.literal_eval(result.stdout))

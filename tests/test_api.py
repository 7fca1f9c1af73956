"""The short names: they are there, they are the modules' own, and the import is free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import toys
from toy_heads import random_heads, save_for

import entmtp_calib
from entmtp_calib.errors import HeadsError


@pytest.mark.parametrize("name", entmtp_calib.__all__)
def test_every_name_is_the_modules_own(name: str) -> None:
    value = getattr(entmtp_calib, name)
    assert value.__name__ == name
    assert value.__module__ == f"entmtp_calib.{entmtp_calib._HOMES[name]}"
    assert name in dir(entmtp_calib)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = entmtp_calib.nonsense


def test_the_import_loads_nothing_else() -> None:
    code = "import sys, entmtp_calib; print([m for m in sys.modules if m.startswith('entmtp_')])"
    code += "; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    run = [sys.executable, "-c", code]
    found = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == ["['entmtp_calib']", "set()"]


def test_heads_are_loaded_by_path_for_their_target(tmp_path: Path) -> None:
    folder = save_for(random_heads(toys.rand(), n_heads=2), toys.rand(), tmp_path / "heads")
    assert entmtp_calib.load_heads(folder, toys.rand()).n_heads == 2
    assert entmtp_calib.load_heads(str(folder), toys.rand()).kind == "hydra"
    with pytest.raises(HeadsError):
        entmtp_calib.load_heads(folder, toys.cycle())

"""`benchmarks/gpu.py` on a CPU and a toy's shape: its cost table prices every tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from entmtp_calib import records
from entmtp_calib.costs import Costs
from entmtp_calib.policy import Ladder
from entmtp_calib.signals import SignalSpec
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, chain

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gpu")
    options = "--device cpu --tiny --dtype float32 --repetitions 1".split()
    command = [sys.executable, "benchmarks/gpu.py", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (out / "stdout").write_text(done.stdout)
    return out


def test_the_cost_table_prices_trees_and_policies_at_any_context_between(folder: Path) -> None:
    table = pq.read_table(folder / "costs.parquet")
    assert table.schema.equals(records.TIMING_SCHEMA, check_metadata=True)
    costs = Costs.of(table.to_pylist(), 32)
    trees = [EMPTY, chain(4), HYDRA_DEFAULT]
    assert np.isfinite(costs.step_ms(trees)).all()
    assert costs.plain_ms is not None
    assert np.isfinite([costs.verify(128), costs.level(4, 32)]).all()
    ladder = Ladder(SignalSpec("chain_value", 4), (0.5,), (0, 2))
    assert np.isfinite(costs.policy_ms(ladder, trees)[:, [0, 2]]).all()


def test_the_table_and_the_document_say_the_same(folder: Path) -> None:
    document = json.loads((folder / "gpu.json").read_text())
    rows = {step["rows"] for step in document["step_ms"]["transformers"]}
    assert rows == {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128}
    [plain] = document["plain"]
    shown = (folder / "stdout").read_text()
    assert f"{plain['tokens_per_second']:.1f} tokens/s" in shown
    assert f"{document['switch_ms']['transformers']:+.3f} ms" in shown

"""The report: every policy on the same texts, and what does the same runs once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from entmtp_calib.artifacts import RunFolder
from entmtp_calib.config import BuildConfig
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Policy, Staged, Static
from entmtp_calib.progress import Silent
from entmtp_calib.signals import SignalSpec
from entmtp_calib.stages import policies
from entmtp_calib.stages.run_prompts import Encoded
from entmtp_calib.steps import Generation, Step

CHAIN = SignalSpec("chain_value", 1)
METHODS: dict[str, Policy] = {
    "plain": Static(0),
    "static": Static(2),
    "ladder": Ladder(None, (), (2,)),
    "hysteresis": Hysteresis(None, 2, 2),
    "staged": Staged(((), (0.5,)), ((DRAFT_ON,), (0, 2))),
    "other": Ladder(CHAIN, (0.5,), (0, 2)),
    "hydra-default": Static(3),
}


class Decoder:
    """Counts what it is asked to write; each text has seconds of its own."""

    written: ClassVar[Counter[Policy]] = Counter()

    def __init__(self, *_: Any) -> None: ...

    def warm_up(self, *_: Any) -> None: ...

    def generate(self, ids: Any, policy: Policy, limit: int) -> Generation:
        self.written[policy] += 1
        step = Step(0, policy.indices[0], 1, 0, 0, 1, None, 0.0, 0.0, 0.0)
        return Generation([1] * limit, "length", [step], float(self.written.total()))


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    monkeypatch.setattr(policies, "Decoder", Decoder)
    monkeypatch.setattr(Decoder, "written", Counter())
    with RunFolder.create(tmp_path / "run", {}) as folder:
        run = SimpleNamespace(
            folder=folder,
            target=None,
            heads=None,
            config=BuildConfig(max_new_tokens=4),
            splits={"report": [Encoded("a", (1,)), Encoded("b", (2,))]},
            progress=Silent(),
        )
        return policies._run_live(run, [], METHODS, "inputs")  # type: ignore[arg-type]


def test_policies_that_came_out_as_one_fixed_tree_run_once(
    texts: dict[str, list[dict[str, Any]]],
) -> None:
    written = Decoder.written
    assert written == dict.fromkeys(
        [METHODS[name] for name in ("plain", "static", "staged", "other", "hydra-default")], 2
    )
    assert list(texts) == list(METHODS)
    assert texts["ladder"] == texts["hysteresis"] == texts["static"]
    assert len({texts[name][0]["seconds"] for name in METHODS}) == 5


def test_their_ratio_is_exactly_one(texts: dict[str, list[dict[str, Any]]]) -> None:
    ratio = policies._ratio("static", texts["ladder"], texts["static"])
    assert ratio == {"ratio_to_static": 1.0, "static_low": 1.0, "static_high": 1.0}

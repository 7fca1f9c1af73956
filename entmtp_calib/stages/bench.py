"""Bench: the methods on the same prompts, in one interleaved run, paired with plain decoding.

The run's folder has a name made of all that was chosen, so the same command finds its earlier work
and resumes it. What the methods are, which prompts may be used, how texts are timed, and what is
made of the times, stands in the `bench_*` modules beside this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from entmtp_calib import files, records
from entmtp_calib.artifacts import RUN, RunFolder
from entmtp_calib.bank import Bank, file_of
from entmtp_calib.config import BenchConfig
from entmtp_calib.errors import UsageError
from entmtp_calib.progress import Progress, Silent
from entmtp_calib.provenance import (
    differences,
    hardware,
    hardware_fingerprint,
    provenance,
    sha256_json,
)
from entmtp_calib.stages.bench_figures import method_rows
from entmtp_calib.stages.bench_methods import (
    MEDUSA_DEFAULT,
    Method,
    Workbench,
    build,
    method_names,
)
from entmtp_calib.stages.bench_prompts import Taken, Unused, take, unused_prompts
from entmtp_calib.stages.bench_run import STAGE, Runner
from entmtp_calib.stages.decode import Session, open_session, session_inputs
from entmtp_calib.stages.run_prompts import Encoded
from entmtp_calib.stages.setup import Inputs, model_facts
from entmtp_calib.targets.likelihood import mean_nll
from entmtp_calib.timing import Clock

TABLE, RUNS, CONDITIONS = "bench.parquet", "bench_runs.parquet", "conditions.json"
BENCHES = Path("artifacts") / "bench"


@dataclass(frozen=True)
class BenchOutcome:
    """What a command shows at its end.

    Attributes:
        folder: with the tables.
        rows: of `bench.parquet`.
        conditions: under which they were measured, as JSON values.
        is_earlier: whether all was measured by an earlier run, so that nothing ran now.
    """

    folder: Path
    rows: list[dict[str, Any]]
    conditions: dict[str, Any]
    is_earlier: bool

    @property
    def divergent(self) -> list[str]:
        """Methods that claim to write plain decoding's text and did not."""
        return [r["method"] for r in self.rows if r["claims_lossless"] and r["divergences"]]

    @property
    def is_lossless(self) -> bool:
        """Whether all methods of ours were asked to write plain decoding's text, and did."""
        return self.conditions["acceptance"]["rule"] == "exact" and not self.divergent

    @property
    def failed(self) -> list[str]:
        """Methods of ours that raised."""
        return [r["method"] for r in self.rows if r["claims_lossless"] and r["error"]]


def bench(
    bank_path: Path,
    config: BenchConfig,
    changes: Inputs,
    out: Path | None = None,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> BenchOutcome:
    """Time the methods against each other.

    Args:
        bank_path: a run folder, or a bank file with `changes` that name model and heads.
        changes: a model, heads, device, dtype or engine other than the run's.
        out: the folder to write or to resume; by default one named by all that was chosen.

    Raises:
        UsageError: a method that does not exist, or an `out` that is the folder of another run.
    """
    bank = Bank.load(bank_path)
    names = method_names(bank, config)
    unused = unused_prompts(bank_path, bank, config.task, config.data)
    session = open_session(bank_path, changes)
    taken = take(unused, session, config.prompts, config.max_new_tokens)
    workbench = Workbench(session, session_inputs(bank_path, bank, changes), config)
    methods, absent = build(names, workbench)
    inputs = _described(bank_path, config, workbench, methods, taken.prompts)
    place = out or _default_folder(session, unused.task, inputs)
    _check_folder(place)
    conditions = _conditions(bank_path, config, workbench, methods, unused, taken, absent)
    with RunFolder.create(place, {STAGE: inputs}) as folder:
        if earlier := _earlier(folder, inputs):
            return earlier
        clock = Clock(str(session.target.device))
        score = None if config.acceptance.is_exact else partial(mean_nll, session.target)
        runner = Runner(methods, config, clock, progress or Silent(), score)
        runs = runner.run(folder, inputs, taken.prompts)
        claims = {name: method.claims_lossless for name, method in methods.items()}
        rows = method_rows(claims, runs, runner.errors)
        _write(folder, inputs, runs, rows, conditions)
        facts = {name: conditions[name] for name in ("bank", "model", "heads", "data")}
        seeds = {"order": config.seed, "sampling": config.seed}
        folder.finish(provenance(command, seeds, facts, str(session.target.device)))
        return _read(folder, is_earlier=False)


def _described(
    bank_path: Path,
    config: BenchConfig,
    workbench: Workbench,
    methods: Mapping[str, Method],
    prompts: Sequence[Encoded],
) -> dict[str, Any]:
    """All that the texts and their times depend on: where it is the same, the work is reused."""
    target = workbench.session.target
    medusa = workbench.medusa[1]["fingerprint"] if MEDUSA_DEFAULT in methods else None
    return {
        "bank": files.hash_file(file_of(bank_path)),
        "model": model_facts(target),
        "heads": workbench.heads_facts["fingerprint"],
        "medusa_heads": medusa,
        "methods": list(methods),
        "prompts": sha256_json([[prompt.id, prompt.ids] for prompt in prompts]),
        "rounds": config.rounds,
        "max_new_tokens": config.max_new_tokens,
        "sampling": config.sampling.to_dict(),
        "acceptance": config.acceptance.to_dict(),
        "hardware": hardware_fingerprint(hardware(str(target.device))),
    }


def _conditions(
    bank_path: Path,
    config: BenchConfig,
    workbench: Workbench,
    methods: Mapping[str, Method],
    unused: Unused,
    taken: Taken,
    absent: Sequence[str],
) -> dict[str, Any]:
    """Beside every figure: what was measured, on what, and what a reader should know."""
    session = workbench.session
    machine = hardware(str(session.target.device))
    changed = [*session.differences, *differences(session.bank.hardware, machine)]
    peers = [name for name, method in methods.items() if not method.claims_lossless]
    notes = [*absent, *unused.notes, *(f"not as the bank was measured: {c}" for c in changed)]
    if taken.too_long:
        notes.append(f"too long for the model's positions: prompts {', '.join(taken.too_long)}")
    if config.prompts and len(taken.prompts) < config.prompts:
        notes.append(f"{config.prompts} prompts were asked for, {len(taken.prompts)} are left")
    if not config.acceptance.is_exact:
        notes.append("typical acceptance is NOT lossless: texts differ, and so does their number")
    if peers and config.acceptance.is_exact and session.target.engine == "lean":
        names = " and ".join(peers)
        notes.append(f"{names}: float32 weights where ours are float16, so near-ties may differ")
    return {
        "bank": str(bank_path),
        "task": unused.task,
        "data": unused.data,
        "origin": taken.origin,
        "prompts": [{"id": p.id, "prompt_tokens": len(p.ids)} for p in taken.prompts],
        "rounds": config.rounds,
        "max_new_tokens": config.max_new_tokens,
        "sampling": config.sampling.to_dict(),
        "acceptance": config.acceptance.to_dict(),
        "model": model_facts(session.target),
        "heads": workbench.heads_facts,
        "medusa_heads": workbench.medusa[1] if MEDUSA_DEFAULT in methods else None,
        "hardware": machine,
        "notes": notes,
    }


def _default_folder(session: Session, task: str, inputs: Mapping[str, Any]) -> Path:
    """artifacts/bench/<model>/<task>/<hash of everything that was chosen>."""
    model = re.sub(r"[^\w.-]+", "--", session.target.name)
    return BENCHES / model / task / sha256_json(inputs)[:12]


def _check_folder(place: Path) -> None:
    """Refuse a bank's run folder, whose settings would be overwritten."""
    if (place / RUN).is_file() and STAGE not in RunFolder.open(place).config:
        raise UsageError(f"--out {place}, the folder of another run", "a folder of its own")


def _write(
    folder: RunFolder,
    inputs: Any,
    runs: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    conditions: Mapping[str, Any],
) -> None:
    folder.write_table(RUNS, records.table(runs, records.BENCH_RUNS_SCHEMA))
    folder.write_table(TABLE, records.table(rows, records.BENCH_SCHEMA))
    folder.write_json(CONDITIONS, conditions)
    folder.mark_done(STAGE, inputs, [TABLE, RUNS, CONDITIONS])


def _earlier(folder: RunFolder, inputs: Any) -> BenchOutcome | None:
    """What an earlier run measured, if no method failed in it."""
    if not folder.is_done(STAGE, inputs):
        return None
    outcome = _read(folder, is_earlier=True)
    return None if any(row["error"] for row in outcome.rows) else outcome


def _read(folder: RunFolder, is_earlier: bool) -> BenchOutcome:
    rows = folder.read_table(TABLE, records.BENCH_SCHEMA).to_pylist()
    return BenchOutcome(folder.path, rows, folder.read_json(CONDITIONS), is_earlier)

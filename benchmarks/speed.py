"""How near a step is to what the machine can do, and how fast EntMTP is beside its peers.

Three parts, in one table: steps and passes of 1 to 64 rows beside their floor; time per token of
plain decoding, transformers, llama.cpp and a bank's policy, on the same prompts in one interleaved
run; and what share of a step is neither a matrix product nor attention. `--json` writes the same
numbers. Without `--bank` a quick one is built first, in a temporary folder.

    python benchmarks/speed.py --bank artifacts/banks/MODEL/gsm8k/RUN --json speed.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import peers
import steps
import torch

from cli import console
from entmtp_calib.artifacts import RunFolder
from entmtp_calib.config import BenchConfig, build_config
from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import EntmtpError
from entmtp_calib.policy import Static
from entmtp_calib.provenance import provenance
from entmtp_calib.records import strict_json
from entmtp_calib.stages.bench_figures import PLAIN
from entmtp_calib.stages.bench_methods import Method, Workbench, build
from entmtp_calib.stages.bench_prompts import take, unused_prompts
from entmtp_calib.stages.bench_run import Runner
from entmtp_calib.stages.build_bank import build_bank
from entmtp_calib.stages.decode import Session, open_session, session_inputs
from entmtp_calib.stages.run_prompts import Encoded
from entmtp_calib.stages.setup import Inputs, model_facts
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.timing import Clock, Interval
from entmtp_calib.tree import EMPTY

PASSES, METHODS, SHARES = PARTS = ("passes", "methods", "shares")
SHARED_TOKENS, SHARED_PROMPTS = 32, 2
COLUMNS = {
    "ms": "ms",
    "x_floor": "x floor",
    "x_one_row": "x 1 row",
    "x_llama_cpp": "x llama.cpp",
    "x_transformers": "x transformers",
    "shares": "matrix/attention/other %",
    "same": "texts as plain's",
}


def main() -> int:
    """Measure, print; 1 if a method of ours failed or wrote another text than plain decoding."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="entmtp-speed-") as folder, console.Reporter() as bar:
        measured = Measured(options, Path(folder), bar)
        document = {part: getattr(measured, part)() for part in PARTS if part in options.only}
        document |= measured.conditions()
    show(document)
    if options.json:
        options.json.write_text(strict_json(document, indent=1) + "\n")
    ours = [row for row in document.get(METHODS, []) if row["claims_lossless"]]
    return int(any(row["error"] or row["texts_as_plain"] < row["texts"] for row in ours))


class Measured:
    """The parts, each measured when asked for; model and bank are loaded once.

    Args:
        options: of the command line.
        folder: for what nobody wants to keep.
        progress: who watches.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, progress: Any) -> None:
        self.options, self.folder, self.progress = options, folder, progress
        self.inputs = Inputs(options.model, options.heads, device="cpu")

    @cached_property
    def bank(self) -> Path:
        """The folder given, or that of a quick bank built now."""
        if self.options.bank:
            return self.options.bank
        place = self.folder / "bank"
        build_bank(build_config("quick"), self.inputs, place, progress=self.progress)
        return place

    @cached_property
    def session(self) -> Session:
        return open_session(self.bank, self.inputs)

    @cached_property
    def target(self) -> Target:
        needs_bank = {METHODS, SHARES} & set(self.options.only)
        return self.session.target if needs_bank else load_target(self.options.model, device="cpu")

    @cached_property
    def prompts(self) -> Sequence[Encoded]:
        """Prompts that had no say in the bank."""
        unused = unused_prompts(self.bank, self.session.bank)
        return take(unused, self.session, self.options.prompts, self.options.tokens).prompts

    @cached_property
    def policy(self) -> str:
        """The name of the bank's best policy."""
        return self.session.bank.auto

    @property
    def ours(self) -> set[str]:
        """The methods that must write plain decoding's text."""
        return {PLAIN, self.policy}

    def passes(self) -> dict[str, Any]:
        """Steps and passes beside their floors."""
        options, work = self.options, steps.work_of(self.target)
        measured = steps.measure_passes(
            self.target, options.context, options.rows, options.rounds, options.seed, self.progress
        )
        floor = partial(work.floor_ms, measured.rates, options.context)
        return {
            "context": options.context,
            "rounds": options.rounds,
            "rates": measured.rates,
            "reads_ms": {name: _ms(each) for name, each in measured.reads.items()},
            "work": work,
            "bytes_of_one_row": work.n_bytes(options.context),
            "flops_of_one_row": work.flops(options.context),
            "step": _beside(floor(), measured.steps),
            "rows": [
                {"rows": n, "x_one_row": measured.ratio(n)} | _beside(floor(n), measured.rows[n])
                for n in options.rows
            ],
        }

    def methods(self) -> list[dict[str, Any]]:
        """Time per token of every method, all on the same prompts in random order."""
        options = self.options
        config = BenchConfig(rounds=1, max_new_tokens=options.tokens, seed=options.seed)
        texts: dict[str, peers.Texts] = {}
        found, absent = self._methods(config)
        methods = {name: peers.recording(found[name], texts.setdefault(name, {})) for name in found}
        runner = Runner(methods, config, Clock(), self.progress)
        with RunFolder.create(self.folder / "runs", {}) as place:
            runs = runner.run(place, {}, self.prompts)
        absent |= runner.errors
        runs = [run for run in runs if run["method"] not in absent]
        return [
            {"method": name, "claims_lossless": name in self.ours, "error": absent[name]}
            if name in absent
            else peers.method_row(name, name in self.ours, runs, texts, self.target.eos_ids)
            for name in dict.fromkeys([*found, *absent])
        ]

    def shares(self) -> dict[str, steps.Shares]:
        """What plain steps and the policy's are spent on."""
        session = self.session
        plain = Decoder(self.target, None, [EMPTY])
        methods = {
            PLAIN: (plain, Static(0)),
            self.policy: (session.decoder(), session.policy(self.policy)),
        }
        prompts = [prompt.ids for prompt in self.prompts[:SHARED_PROMPTS]]
        tokens = min(SHARED_TOKENS, self.options.tokens)
        return steps.measure_shares(methods, prompts, tokens, self.options.seed, self.progress)

    def conditions(self) -> dict[str, Any]:
        """What stands beside every number."""
        options = self.options
        facts: dict[str, Any] = {"model": model_facts(self.target), "xllamacpp": peers.installed()}
        if "session" in vars(self):
            bank = self.session.bank
            facts |= {"heads": bank.heads, "policy": self.policy, "task": bank.task}
            facts |= {"prompts": [p.id for p in self.prompts], "max_new_tokens": options.tokens}
        command = ["python", *sys.argv]
        return provenance(command, {"order": options.seed}, facts)

    def _methods(self, config: BenchConfig) -> tuple[dict[str, Method], dict[str, str]]:
        """The methods that can take part, and why one cannot."""
        inputs = session_inputs(self.bank, self.session.bank, self.inputs)
        workbench = Workbench(self.session, inputs, config)
        methods, _ = build([PLAIN, peers.TRANSFORMERS, self.policy], workbench)
        exact = workbench.peers
        half = peers.HalfPeers(exact, self.target, inputs.model)
        methods[peers.HALF] = Method(peers.HALF, half.generate, claims_lossless=False)
        if not peers.installed():
            return methods, {peers.LLAMA: "pip install 'entmtp[bench]' brings xllamacpp"}
        folder = self.options.gguf or self.folder
        file = partial(peers.cached_gguf, self.target, lambda: exact.network, folder)
        longest = max(len(prompt.ids) for prompt in self.prompts) + config.max_new_tokens
        peer = peers.LlamaCpp(file, longest + 1, torch.get_num_threads())
        methods[peers.LLAMA] = Method(peers.LLAMA, peer.generate, claims_lossless=False)
        return methods, {}


def _ms(seconds: Sequence[float]) -> Interval:
    return steps.quartiles([1000 * each for each in seconds])


def _beside(floor_ms: float, seconds: Sequence[float]) -> dict[str, Any]:
    taken = _ms(seconds)
    return {"ms": taken, "floor_ms": floor_ms, "x_floor": taken.value / floor_ms}


def show(document: Mapping[str, Any]) -> None:
    """The table, then what its figures mean and were measured on."""
    table = [*_pass_cells(document.get(PASSES)), *_method_cells(document)]
    used = [column for column in COLUMNS if any(column in cells for _, cells in table)]
    rows = [[name, *(cells.get(column, "-") for column in used)] for name, cells in table]
    console.show_table(["", *(COLUMNS[column] for column in used)], rows)
    console.write("\n")
    console.show_facts(_facts(document))


def _pass_cells(passes: Mapping[str, Any] | None) -> list[tuple[str, dict[str, str]]]:
    """Per step or pass its name and the texts of its columns."""
    if passes is None:
        return []

    def cells(row: Mapping[str, Any]) -> dict[str, str]:
        return {"ms": _bounds(row["ms"]), "x_floor": f"{row['x_floor']:.2f}"}

    floor = {"ms": f"{passes['step']['floor_ms']:.3f}", "x_floor": "1.00"}
    return [
        (f"floor of one row, context {passes['context']}", floor),
        ("step of plain decoding", cells(passes["step"])),
        *(
            (f"pass, rows: {row['rows']}", cells(row) | {"x_one_row": _bounds(row["x_one_row"])})
            for row in passes["rows"]
        ),
    ]


def _method_cells(document: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """The same per method, with its shares, per token."""
    cells: dict[str, dict[str, str]] = {}
    for row in document.get(METHODS, []):
        cells[row["method"]] = {"same": row["error"] or _same(row)}
        if not row["error"]:
            figures = {"ms": row["ms_per_token"]} | {c: row[c] for c in peers.BASELINES if row[c]}
            cells[row["method"]] |= {column: _bounds(each) for column, each in figures.items()}
    for name, shares in document.get(SHARES, {}).items():
        parts = (100 * shares.share(each) for each in (steps.MATRIX, steps.ATTENTION, steps.OTHER))
        text = "/".join(f"{part:.1f}" for part in parts)
        text += f" (other {100 * shares.unprofiled_other:.1f})"
        cells.setdefault(name, {})["shares"] = text
    return [(f"{name}, a token", each) for name, each in cells.items()]


def _same(row: Mapping[str, Any]) -> str:
    text = f"{row['texts_as_plain']}/{row['texts']}"
    if row["texts_as_plain"] == row["texts"]:
        return text
    return f"{text}, {row['tokens_in_common']} of {row['tokens_of_plain']} tokens"


def _bounds(figure: Interval) -> str:
    return f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine, passes = document["hardware"], document.get(PASSES)
    facts = [
        ("machine", f"{machine['cpu']}, {machine['torch_threads']} threads"),
        ("model", f"{document['model']['name']}, engine {document['model']['engine']}"),
    ]
    if passes:
        rates, work = passes["rates"], passes["work"]
        facts += [
            ("passes", f"medians and quartiles of {passes['rounds']} interleaved rounds"),
            (
                "floor",
                f"{passes['bytes_of_one_row'] / 1e6:.1f} MB ({work.weight_bytes} a weight) at "
                f"{rates.bytes_per_second / 1e9:.2f} GB/s, {passes['flops_of_one_row'] / 1e6:.0f} "
                f"Mflop at {rates.flops_per_second / 1e9:.1f} Gflop/s, the longer; other "
                "numbers of rows stand beside their own",
            ),
        ]
    if METHODS in document:
        count = len(document["prompts"])
        facts += [
            ("methods", f"{count} prompts of {document['task']}, totals, decoding only"),
            ("intervals", "95 %, paired bootstrap over the prompts"),
            ("texts", "as plain's up to its EOS; else the tokens before the first other one"),
        ]
    if SHARES in document:
        facts.append(
            ("shares", "of profiled steps, profiling itself in other; in brackets without it")
        )
    return facts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bank", type=Path, metavar="FOLDER", help="a bank's run folder")
    parser.add_argument("--model", help="other than the default, or than the bank's")
    parser.add_argument("--heads", help="other than the default model's, or than the bank's")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--prompts", type=_count, default=8)
    parser.add_argument("--tokens", type=_count, default=64, help="most per text")
    parser.add_argument("--context", type=_count, default=256, help="tokens before a pass")
    parser.add_argument("--rows", type=_count, nargs="+", default=steps.ROWS, help="and 1")
    parser.add_argument("--rounds", type=_count, default=15, help="of the passes")
    parser.add_argument("--gguf", type=Path, metavar="FOLDER", help="keeps llama.cpp's file")
    parser.add_argument("--seed", type=int, default=0, help="of all orders")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.rows = sorted({1, *options.rows})
    return options


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}; expected at least 1")
    return count


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EntmtpError as error:
        console.say(f"error: {error}")
        sys.exit(error.exit_code)

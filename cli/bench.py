"""`entmtp bench`: a bank's policies, plain decoding and other methods, timed side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import console, options
from cli.figures import UNDEFINED, number, row_bounds
from entmtp_calib.config import AcceptanceConfig, BenchConfig

if TYPE_CHECKING:
    from entmtp_calib.stages.bench import BenchOutcome

COLUMNS = (
    "method",
    "tokens/s [95 %]",
    "decode only",
    "x plain [95 %]",
    "x hydra-default [95 %]",
    "x static [95 %]",
    "emitted/step",
    "accepted/step",
    "step ms",
    "switches",
    "same text",
)
NLL = "nats/token (less plain's)"
DEFAULTS = BenchConfig()
RATIOS = ("ratio_to_plain", "ratio_to_hydra_default", "ratio_to_static")


def bench(
    bank: options.BankArgument,
    task: Annotated[
        str | None, typer.Option("--task", metavar="TASK", help="Other than the bank's.")
    ] = None,
    data: options.Data = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B,C",
            parser=options.given,
            help="plain (always), transformers, prompt-lookup, medusa-default, hydra-default, "
            "eagle2 (a tree built anew each step), static, ladder, hysteresis, staged, or a tree's "
            "id. [all that are possible]",
        ),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", metavar="N", help="How many. [the bank's report split]"),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", help="Times that each text is timed.")
    ] = DEFAULTS.rounds,
    max_new_tokens: options.MaxNewTokens = DEFAULTS.max_new_tokens,
    temperature: options.Temperature = DEFAULTS.temperature,
    top_p: options.TopP = DEFAULTS.top_p,
    top_k: options.TopK = DEFAULTS.top_k,
    acceptance: options.Acceptance = DEFAULTS.acceptance.rule,
    epsilon: options.Epsilon = None,
    alpha: options.Alpha = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of the order and of the sampling.")
    ] = DEFAULTS.seed,
    medusa_heads: Annotated[
        str | None,
        typer.Option(
            "--medusa-heads",
            metavar="FOLDER",
            parser=options.given,
            help="The Medusa heads of medusa-default.",
        ),
    ] = None,
    model: options.Model = None,
    heads: options.Heads = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine: options.Engine = "auto",
    out: options.Out = None,
    json: console.JsonFile = None,
) -> None:
    """Time a bank's policies against plain decoding and other methods, on unseen prompts.

    One interleaved run, the same prompts and the same number of tokens for all. The exit code is 1
    if a method of ours fails or writes another text than plain decoding.
    """
    config = BenchConfig(
        methods=tuple(map(str.strip, methods.split(","))) if methods else None,
        task=task,
        data=data,
        medusa_heads=medusa_heads,
        prompts=prompts,
        rounds=rounds,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        acceptance=AcceptanceConfig.of(acceptance, epsilon, alpha),
    )
    from entmtp_calib.stages.bench import bench as measure
    from entmtp_calib.stages.setup import Inputs

    changes = Inputs(model, heads, None, device, dtype, engine)
    with console.Reporter() as progress:
        done = measure(bank, config, changes, out, options.command_line(), progress)
    document = {
        **done.conditions,
        "folder": done.folder,
        "lossless": done.is_lossless,
        "methods": done.rows,
    }
    console.present(lambda: _print(done), document, json)
    if done.divergent or done.failed:
        raise typer.Exit(1)


def _print(done: BenchOutcome) -> None:
    failed = any(row["error"] for row in done.rows)
    scored = any(row["nll"] is not None for row in done.rows)
    columns = [*COLUMNS, *[NLL] * scored, *["error"] * failed]
    console.show_table(columns, (_cells(row, scored, failed) for row in done.rows))
    console.write("\n")
    if done.failed:
        console.write(f"failed: {', '.join(done.failed)}\n\n")
    if done.divergent:
        console.write(f"NOT lossless here: {', '.join(done.divergent)}\n\n")
    elif not done.is_lossless:
        console.write("NOT lossless: typical acceptance; nats are those of the texts per token\n\n")
    elif not done.failed:
        console.write("every text of our own methods is plain decoding's, token for token\n\n")
    console.show_facts(_facts(done))


def _facts(done: BenchOutcome) -> list[tuple[str, str]]:
    known = done.conditions
    tokens = next(row["tokens"] for row in done.rows if row["method"] == "plain")
    prompts, rounds = known["prompts"], known["rounds"]
    notes = list(known["notes"])
    if done.is_earlier:
        notes.append("measured earlier; to measure again, remove the folder or name another --out")
    return [
        ("data", known["data"]),
        ("prompts", f"{', '.join(p['id'] for p in prompts)} ({known['origin']})"),
        ("texts", f"{len(prompts)} prompts x {rounds}, {tokens} tokens with each method"),
        *(("note", note) for note in notes),
        ("folder", str(done.folder)),
    ]


def _cells(row: Mapping[str, Any], scored: bool, failed: bool) -> list[str]:
    cells = [
        row["method"],
        _bounded(row, "tokens_per_second", 2),
        number(row["decode_tokens_per_second"], 2),
        *(_bounded(row, ratio, 3) for ratio in RATIOS),
        number(row["mean_emitted_tokens"], 3),
        number(row["mean_accepted_draft_tokens"], 3),
        number(row["step_ms"], 2),
        UNDEFINED if row["switches"] is None else str(row["switches"]),
        f"{row['texts'] - row['divergences']}/{row['texts']}",
    ]
    if scored:
        cells.append(f"{number(row['nll'], 4)} ({_signed(row['nll_difference'])})")
    return [*cells, row["error"] or UNDEFINED] if failed else cells


def _signed(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:+.4f}"


def _bounded(row: Mapping[str, Any], column: str, digits: int) -> str:
    return row_bounds(row, column, f"{column}_low", f"{column}_high", digits)

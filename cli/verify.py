"""`entmtp verify`: whether every tree and policy gives plain decoding's text, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import console, options
from cli.figures import number
from entmtp_calib.config import DecodeConfig, SamplingConfig
from entmtp_calib.errors import UsageError

if TYPE_CHECKING:
    from entmtp_calib.stages.verify import Divergence, Verification

COLUMNS = ("prompt", "with", "temperature", "seed", "token", "expected", "found", "gap", "rows")


def verify(
    bank: options.BankArgument,
    prompts: Annotated[
        int, typer.Option("--prompts", metavar="N", help="Prompts, from the front of the data.")
    ] = 4,
    task: Annotated[
        str | None, typer.Option("--task", metavar="TASK", help="Other than the bank's.")
    ] = None,
    data: options.Data = None,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = 0,
    model: options.Model = None,
    heads: options.Heads = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine: options.Engine = "auto",
    json: console.JsonFile = None,
) -> None:
    """Compare the text of all trees with plain decoding's.

    Every tree and policy decodes greedily and sampled, on prompts of the bank's own data. The
    exit code is 1 if any text differs.
    """
    config = DecodeConfig(max_new_tokens, SamplingConfig(temperature, top_p, top_k, seed))
    if prompts < 1:
        raise UsageError(f"--prompts {prompts}", "a whole number of at least 1")
    if temperature == 0:
        raise UsageError("--temperature 0", "a number above 0; greedy text is compared in any case")
    from entmtp_calib.stages.decode import open_session
    from entmtp_calib.stages.setup import Inputs
    from entmtp_calib.stages.verify import bank_prompts
    from entmtp_calib.stages.verify import verify as compare

    found = bank_prompts(bank, prompts, task, data)
    session = open_session(bank, Inputs(model, heads, None, device, dtype, engine))
    with console.Reporter() as progress:
        result = compare(session, found.prompts, config.max_new_tokens, config.sampling, progress)
    document = {
        "bank": bank,
        "data": found.describe(),
        **config.to_dict(),
        **vars(result),
        "lossless": not result.divergences,
    }
    console.present(lambda: _print(result, found.describe()), document, json)
    if result.divergences:
        raise typer.Exit(1)


def _print(result: Verification, data: str) -> None:
    console.show_facts(
        [
            ("data", data),
            ("texts", str(result.texts)),
            ("tokens", f"{result.tokens_greedy} greedy, {result.tokens_sampled} sampled"),
            ("logits", _logits(result)),
        ]
    )
    if not result.divergences:
        console.write("lossless: every text is plain decoding's, token for token\n")
        return
    console.write("\n")
    console.show_table(COLUMNS, map(_cells, result.divergences))
    console.write(
        f"\nNOT lossless here: {len(result.divergences)} of {result.texts} texts differ\n"
        "gap: plain decoding's logit of the expected token minus that of the found one (sampled:\n"
        "with the noise of the draw). Near 0 it is a near-tie, which rounding may decide\n"
        "otherwise in a pass of other rows; anything larger is a fault.\n"
    )


def _logits(result: Verification) -> str:
    if result.positions_equal == result.positions:
        return f"the same bits at all {result.positions} positions compared"
    return (
        f"the same bits at {result.positions_equal} of {result.positions} positions compared, "
        f"elsewhere up to {result.largest_difference:.2g} apart"
    )


def _cells(divergence: Divergence) -> list[str]:
    return [
        divergence.prompt,
        divergence.method,
        f"{divergence.sampling.temperature:g}",
        str(divergence.sampling.seed),
        str(divergence.position),
        _token(divergence.expected),
        _token(divergence.found),
        number(divergence.logit_gap, 6),
        str(divergence.rows),
    ]


def _token(token: Any) -> str:
    return "end" if token is None else str(token)

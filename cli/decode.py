"""`entmtp decode`: generate with a bank; text on stdout as it is accepted, figures on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import console, options
from cli.figures import number, percent
from entmtp_calib.config import PROMPT_MODES, AcceptanceConfig, DecodeConfig, SamplingConfig
from entmtp_calib.errors import DataError, UsageError

if TYPE_CHECKING:
    from entmtp_calib.prompts import Prompt
    from entmtp_calib.stages.decode import Decoded, Session

SEPARATOR = "---\n"


def decode(
    bank: options.BankArgument,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="Without it, stdin is the prompt."),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts-file",
            metavar="FILE",
            help="Rows with a prompt or messages; or a .txt file, a prompt per line.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Short for --prompt-mode chat or raw."),
    ] = None,
    prompt_mode: Annotated[
        str | None,
        typer.Option(
            "--prompt-mode",
            metavar="NAME",
            help=f"{options.BUILD_HELP['prompt_mode']} [as in the bank]",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="auto (the bank's choice), static, ladder, hysteresis, staged, none (plain "
            "decoding), hydra-default or a tree's id.",
        ),
    ] = "auto",
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = 0,
    acceptance: options.Acceptance = "exact",
    epsilon: options.Epsilon = None,
    alpha: options.Alpha = None,
    max_new_tokens: options.MaxNewTokens = 128,
    model: options.Model = None,
    heads: options.Heads = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine: options.Engine = "auto",
    json: console.JsonFile = None,
) -> None:
    """Generate with a bank; the text is the same with every policy, but for typical acceptance.

    Text goes to stdout as it is accepted, the figures and all else to stderr.
    """
    config = DecodeConfig(
        max_new_tokens,
        SamplingConfig(temperature, top_p, top_k, seed),
        AcceptanceConfig.of(acceptance, epsilon, alpha),
    )
    mode = _mode(chat, prompt_mode)
    prompts = _prompts(prompt, prompts_file)
    from entmtp_calib.stages.decode import decode_prompts, open_session, summary
    from entmtp_calib.stages.setup import Inputs

    session = open_session(bank, Inputs(model, heads, None, device, dtype, engine))
    chosen = session.policy(policy)
    for line in _differences(session):
        console.say(f"note: {line}")
    streams = str(json) != "-"
    texts = decode_prompts(
        session,
        prompts,
        chosen,
        config,
        mode=mode,
        on_text=(lambda _, piece: console.write(piece)) if streams else None,
    )
    decoded = list(_separated(texts, len(prompts)) if streams else texts)
    figures = summary(decoded, session.trees)
    named = f"auto: {session.bank.auto}" if policy == "auto" else policy
    console.say(_line(figures, named, config.acceptance))
    document = {
        "bank": bank,
        "policy": policy,
        **config.to_dict(),
        "lossless": config.acceptance.is_exact,
        **figures,
        "texts": [_text_document(text, session) for text in decoded],
    }
    console.present(lambda: None, document, json)


def _mode(chat: bool | None, name: str | None) -> str | None:
    """How prompts become text; None: as the bank's were."""
    if chat is not None and name is not None:
        raise UsageError(f"--prompt-mode with {'--chat' if chat else '--raw'}", "one of them")
    if name is not None and name not in PROMPT_MODES:
        raise UsageError(f"--prompt-mode {name}", f"one of {', '.join(PROMPT_MODES)}")
    return name if chat is None else "chat" if chat else "raw"


def _prompts(text: str | None, file: Path | None) -> list[Prompt]:
    """The prompts that were asked for, or that of stdin; none of them is blank."""
    from entmtp_calib.prompts import Prompt, load_prompts

    if text is not None and file is not None:
        raise UsageError("--prompt with --prompts-file", "one of them")
    if file is not None and file.suffix != ".txt":
        return list(load_prompts("custom", file).prompts)
    if file is not None:
        lines = [line.removesuffix("\r") for line in _read(file).split("\n")]
        return [
            Prompt(f"line-{number}", (("user", line),))
            for number, line in enumerate(lines, 1)
            if line.strip()
        ] or _refuse(file)
    if text is None:
        text = _stdin()
    if not text.strip():
        return _refuse("the prompt")
    _check_unicode(text)
    return [Prompt("prompt", (("user", text),))]


def _refuse(what: object) -> list[Prompt]:
    raise DataError(f"{what} is empty", "some text to go on from")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", "a file of prompts") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}, byte {error.start + 1}: not UTF-8", "UTF-8 text") from error


def _stdin() -> str:
    """All of stdin but the last line's end."""
    if sys.stdin.isatty():
        raise UsageError("no --prompt", "--prompt TEXT, --prompts-file FILE, or text on stdin")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"stdin, byte {error.start + 1}: not UTF-8", "UTF-8 text") from error
    return text.removesuffix("\n").removesuffix("\r")


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError("the prompt is not valid Unicode text", "UTF-8") from error


def _differences(session: Session) -> list[str]:
    """What is not as it was when the bank was measured, and what to do about it."""
    from entmtp_calib.provenance import differences, hardware

    found = differences(session.bank.hardware, hardware(str(session.target.device)))
    lines = [f"not as measured: {line}" for line in (*session.differences, *found)]
    if lines:
        lines.append("the text is right all the same; entmtp recalibrate measures the bank again")
    return lines


def _separated(texts: Iterator[Decoded], count: int) -> Iterator[Decoded]:
    """Give every streamed text a last line end, and put a line between it and the next."""
    for index, text in enumerate(texts, 1):
        yield text
        ending = "" if text.text.endswith("\n") else "\n"
        console.write(ending + (SEPARATOR if index < count else ""))


def _line(figures: dict[str, Any], policy: str, acceptance: AcceptanceConfig) -> str:
    """All figures in one line."""
    rate = number(figures["decode_tokens_per_second"], 1)
    shares = ", ".join(f"{tree} {percent(share)}" for tree, share in figures["share"].items())
    return (
        f"{figures['tokens']} tokens, {rate} tokens/s decoding (without the prompt's pass), "
        f"{figures['mean_emitted_tokens']:.2f} emitted tokens/step, "
        f"{figures['mean_accepted_draft_tokens']:.2f} accepted draft tokens/step, "
        f"policy {policy}"
        + (f", steps: {shares}" if shares else "")
        + ("" if acceptance.is_exact else ", typical acceptance: not lossless")
    )


def _text_document(text: Decoded, session: Session) -> dict[str, Any]:
    generation = text.generation
    return {
        "id": text.prompt.id,
        "text": text.text,
        "tokens": generation.tokens,
        "reason": generation.reason,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        # A step without rows ended the text with its root alone; no tree was chosen for it.
        "steps": [
            {**vars(step), "tree": session.trees[step.tree].id if step.rows else None}
            for step in generation.steps
        ],
    }

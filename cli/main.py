"""The command line: its commands in the order of the workflow, and the one error boundary.

Each command is a thin file beside this one: parse, call one stage, render. It imports its stage
inside its body, so that `entmtp --help` never waits for torch. Errors that the user can act on are
printed as one line; bugs raise. This module knows nothing of what the commands do.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from cli import console
from cli.bench import bench
from cli.build_bank import build_bank
from cli.decode import decode
from cli.doctor import doctor
from cli.explain import explain
from cli.export import export
from cli.grow import grow
from cli.import_heads import import_heads
from cli.import_trees import import_trees
from cli.recalibrate import recalibrate
from cli.rollout import rollout
from cli.show import show
from cli.signals import signals
from cli.simulate import simulate
from cli.time import time
from cli.train_heads import train_heads
from cli.verify import verify
from entmtp_calib.errors import EntmtpError, EntmtpWarning

INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143  # 128 + signal, as a shell reports them


class Terminated(BaseException):
    """Raised by SIGTERM, so that files are closed and locks released as after Ctrl-C."""


class Commands(TyperGroup):
    """A group of commands inside the error boundary."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let --debug stand anywhere before `--`: it is moved to the front, where it belongs."""
        end = args.index("--") if "--" in args else len(args)
        if "--debug" in args[:end]:
            args = ["--debug", *(a for a in args[:end] if a != "--debug"), *args[end:]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _boundary(debug=ctx.params["debug"]):
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


@contextlib.contextmanager
def _boundary(debug: bool) -> Iterator[None]:
    """The one place where exceptions become a line and an exit code."""
    try:
        yield
    except EntmtpError as error:
        if debug:
            traceback.print_exc()
        console.say(f"entmtp: {error}")
        raise typer.Exit(error.exit_code) from None
    except (KeyboardInterrupt, Terminated) as stop:
        console.say("entmtp: interrupted; run the same command again to resume")
        code = TERMINATED if isinstance(stop, Terminated) else INTERRUPTED
        raise typer.Exit(code) from None
    except BrokenPipeError:
        _forget_stdout()
        raise typer.Exit(BROKEN_PIPE) from None


def _forget_stdout() -> None:
    """Nobody reads stdout any more: let the interpreter's last flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=Commands,
    name="entmtp",
    help="Choose speculation trees by measuring them, and decode with them losslessly.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

COMMANDS = (
    *(build_bank, recalibrate, decode, verify, bench, simulate, signals, explain, show, doctor),
    *(export, import_trees),
    *(rollout, grow, time),
    *(train_heads, import_heads),
)
for command in COMMANDS:
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console.write(f"entmtp {version('entmtp')}\n")
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Nothing to do here: `Commands` reads the flag, the callback prints the version."""


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


_show_others = warnings.showwarning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings are one line; the place in the code says nothing to the user."""
    if issubclass(category, EntmtpWarning):
        console.say(f"entmtp: {message}")
    else:
        _show_others(message, category, filename, lineno, file, line)


def _speak_utf8() -> None:
    """Under a locale without an encoding (LC_ALL=C), print UTF-8 rather than fail on an accent."""
    for stream in (sys.stdout, sys.stderr):
        if codecs.lookup(stream.encoding).name == "ascii":
            stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]


def main() -> None:
    """Run one command in this process: the console script `entmtp`."""
    signal.signal(signal.SIGTERM, _terminate)
    _speak_utf8()
    warnings.showwarning = _show_warning
    try:
        app()
    except SystemExit as stop:  # typer exits with 1 if the pipe breaks before a command runs
        if isinstance(stop.__context__, BrokenPipeError):
            _forget_stdout()
            sys.exit(BROKEN_PIPE)
        raise


if __name__ == "__main__":
    main()

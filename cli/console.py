"""What the user sees: results on stdout, everything else on stderr, and progress.

Data (paths, prompts, model text, messages) is never read as markup, and nothing is wrapped or cut
to the width of the terminal, so that what is redirected is whole. Control characters in messages
are shown escaped. Colors, bars and cursor movements appear only on a terminal; NO_COLOR, TERM=dumb
and the like are respected by rich. This module knows no command and no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from entmtp_calib.errors import EntmtpError

ENDLESS = 100_000  # columns: rich neither wraps nor cuts, the terminal wraps what is too long
PLAIN_INTERVAL_S = 15.0

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the same as JSON (- for stdout alone)."),
]


class _Console(Console):
    """A console that leaves a closed pipe to the one error boundary."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError from None


def _console(**settings: Any) -> Console:
    return _Console(markup=False, emoji=False, highlight=False, **settings)


out = _console(width=ENDLESS, height=25)  # with a height, a dumb terminal has the width too
err = _console(stderr=True)


def write(text: str) -> None:
    """Write to stdout exactly these characters, now; for model text, streamed or not."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(message: str) -> None:
    """One line on stderr: what the user should know besides the result."""
    sys.stderr.write(printable(message) + "\n")
    sys.stderr.flush()


def printable(text: str) -> str:
    """The text on one line, control characters escaped, so that it cannot steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Names and values, a pair a line, the values in one column."""
    facts = list(facts)
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        out.print(Text.assemble((name.ljust(width), "bold"), "  ", printable(value)))


def show_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table with one line per row; the first column is left-aligned, figures right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    out.print(table)


def present(render: Callable[[], None], document: Any, json: Path | None) -> None:
    """Show a command's result, and write it as JSON if asked; `-` puts the JSON alone on stdout.

    Args:
        render: prints the result for a reader.
        document: the same figures, as JSON values.
        json: what `--json` names.
    """
    on_stdout = str(json) == "-"
    if not on_stdout:
        render()
    if json is not None:
        from entmtp_calib.records import strict_json

        text = strict_json(document) + "\n"
        if on_stdout:
            write(text)
        else:
            _write_file(json, text)


def _write_file(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EntmtpError(
            f"cannot write {file}: {error.strerror}", action="give --json another file"
        ) from error


def duration(seconds: float) -> str:
    """Minutes and seconds as 4:05, with hours 1:04:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Reporter:
    """The library's `Progress` on stderr: a bar on a terminal, else a plain line now and then.

    Use it as a context manager: on leaving, however it is left, the terminal is as it was.
    """

    def __init__(self, console: Console = err, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._what, self._total, self._finished, self._note = "", 0, 0, ""
        self._started = self._spoke = 0.0

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_bar()

    def start(self, what: str, total: int) -> None:
        self._stop_bar()
        self._what, self._total, self._finished, self._note = what, total, 0, ""
        self._started = self._spoke = self._clock()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}" if total else "", markup=False),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
                redirect_stdout=False,
            )
            self._task = self._bar.add_task(printable(what), total=total or None, note="")
            self._bar.start()

    def advance(self, n: int = 1, note: str = "") -> None:
        self._finished += n
        self._note = printable(note) or self._note
        if self._bar:
            self._bar.update(self._task, advance=n, note=self._note)
        elif self._clock() - self._spoke >= PLAIN_INTERVAL_S:
            self._spoke = self._clock()
            say(self._line())

    def done(self) -> None:
        if self._bar:
            self._stop_bar()
        elif self._spoke > self._started:  # silent work that was short stays silent
            say(f"{self._what}: done in {duration(self._clock() - self._started)}")

    def _line(self) -> str:
        """Where the work stands, as `rollout: 12/100 (12%), 0:35 elapsed, about 4:17 left`."""
        elapsed = self._clock() - self._started
        count = f"{self._finished}"
        left = ""
        if self._total:
            count += f"/{self._total} ({self._finished / self._total:.0%})"
            if self._finished:
                rest = elapsed / self._finished * (self._total - self._finished)
                left = f", about {duration(rest)} left"
        note = f", {self._note}" if self._note else ""
        return f"{self._what}: {count}, {duration(elapsed)} elapsed{left}{note}"

    def _stop_bar(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

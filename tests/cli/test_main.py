"""The error boundary: one line and an exit code for the user, a traceback for bugs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.main import Terminated, _show_warning, app
from entmtp_calib.errors import DataError, EntmtpWarning, UsageError

ROOT = Path(__file__).parents[2]
HOSTILE = "data file /x/[/y]/[id].jsonl holds List[int] [red]:smile: \x1b[2J"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def failing() -> Iterator[Callable[[BaseException], None]]:
    """Give the app a command `fail` that raises what it is told to."""

    def add(error: BaseException) -> None:
        @app.command()
        def fail() -> None:
            raise error

    before = list(app.registered_commands)
    yield add
    app.registered_commands[:] = before


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (DataError("no rows", "one", "add one"), 1, "entmtp: no rows; expected one; add one\n"),
        (UsageError("--top-p 2"), 2, "entmtp: --top-p 2\n"),
        (KeyboardInterrupt(), 130, "entmtp: interrupted; run the same command again to resume\n"),
        (Terminated(), 143, "entmtp: interrupted; run the same command again to resume\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_what_the_user_can_act_on_is_one_line(
    failing: Any, error: BaseException, exit_code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.main._forget_stdout", lambda: None)
    failing(error)
    result = run("fail")
    assert (result.exit_code, result.stderr, result.stdout) == (exit_code, line, "")


def test_a_warning_of_ours_is_one_line_and_others_keep_their_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Any] = []
    monkeypatch.setattr("cli.main._show_others", lambda *shown: others.append(shown))
    _show_warning(EntmtpWarning("drafting runs slower"), EntmtpWarning, "some/file.py", 3)
    assert capsys.readouterr().err == "entmtp: drafting runs slower\n"
    _show_warning("old", UserWarning, "some/file.py", 3)
    assert others == [("old", UserWarning, "some/file.py", 3, None, None)]


def test_a_bug_raises(failing: Any) -> None:
    failing(ZeroDivisionError("ours"))
    assert isinstance(run("fail").exception, ZeroDivisionError)


def test_a_message_is_printed_as_it_is_and_cannot_steer_the_terminal(failing: Any) -> None:
    failing(DataError(HOSTILE))
    assert run("fail").stderr == f"entmtp: {HOSTILE}\n".replace("\x1b", "\\x1b")


@pytest.mark.parametrize("arguments", [("--debug", "fail"), ("fail", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(failing: Any, arguments: Any) -> None:
    failing(DataError("no rows"))
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("entmtp: no rows\n")


def test_debug_behind_two_dashes_is_an_argument() -> None:
    result = run("show", "--", "--debug")
    assert result.exit_code == 1
    assert "--debug" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("--nope",), ("show", "--nope", "plain"), ("shwo",)])
def test_a_usage_error_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_no_arguments_show_the_help() -> None:
    result = run()
    assert "Commands:" in result.output


def process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The command line in a process of its own, its output piped."""
    return subprocess.Popen(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


@pytest.mark.parametrize("arguments", [("--help",), ("show", "hydra-default")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_quiet(arguments: tuple[str, ...], unbuffered: str) -> None:
    with process(*arguments, PYTHONUNBUFFERED=unbuffered) as child:
        assert child.stdout
        assert child.stderr
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 141


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_process_with_its_code(number: int, code: int) -> None:
    program = (
        "import signal, time, cli.main as main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # may be inherited as ignored
        "@main.app.command()\n"
        "def wait():\n"
        "    main.console.write('ready\\n')\n"
        "    time.sleep(60)\n"
        "main.main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "wait"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        _, errors = child.communicate(timeout=10)
    assert child.returncode == code
    assert errors == "entmtp: interrupted; run the same command again to resume\n"


def test_a_locale_without_an_encoding_gets_utf8() -> None:
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    with process("show", "chain-2", **plain) as child:
        output, errors = child.communicate(timeout=30)
    assert child.returncode == 0, errors
    assert "└─ 0" in output

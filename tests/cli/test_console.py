"""Progress on stderr, as a bar on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cli.console import Reporter, duration, printable
from entmtp_calib.progress import Progress, Silent


class Time:
    """A clock that the test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3725, "1:02:05")])
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_control_characters_are_shown_and_all_else_is_kept() -> None:
    assert printable("[/b] é😀\n\r\x1b[2J\u2028") == "[/b] é😀\\n\\r\\x1b[2J\\u2028"


def test_without_a_terminal_a_plain_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    time = Time()
    with Reporter(Console(file=io.StringIO()), time) as progress:
        progress.start("grow [red]", 100)
        for time.now in range(1, 41):
            progress.advance(1, note="depth 2")
        progress.done()
    assert capsys.readouterr().err.splitlines() == [
        "grow [red]: 15/100 (15%), 0:15 elapsed, about 1:25 left, depth 2",
        "grow [red]: 30/100 (30%), 0:30 elapsed, about 1:10 left, depth 2",
        "grow [red]: done in 0:40",
    ]


def test_work_of_unknown_length_has_no_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    time = Time()
    with Reporter(Console(file=io.StringIO()), time) as progress:
        progress.start("load", 0)
        time.now = 20.0
        progress.advance(3)
    assert capsys.readouterr().err == "load: 3, 0:20 elapsed\n"


def test_short_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(Console(file=io.StringIO())) as progress:
        progress.start("load", 2)
        progress.advance(2)
        progress.done()
    assert capsys.readouterr().err == ""


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system="standard")


def test_on_a_terminal_a_bar_shows_titles_and_notes_as_they_are() -> None:
    console = terminal()
    with Reporter(console) as progress:
        progress.start("time [/b] a[1:]", 10)
        progress.advance(4, note="d[key] :smile:")
        progress.done()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "time [/b] a[1:]" in shown
    assert "4/10" in shown
    assert "d[key] :smile:" in shown


def test_an_interrupted_bar_gives_the_cursor_back() -> None:
    console = terminal()

    def interrupted() -> None:
        with Reporter(console) as progress:
            progress.start("time", 10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")  # type: ignore[attr-defined]


@pytest.mark.parametrize("progress", [Silent(), Reporter(terminal())])
def test_whatever_watches_is_a_progress(progress: Progress) -> None:
    progress.start("one", 1)
    progress.advance()
    progress.done()

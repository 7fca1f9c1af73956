"""`entmtp doctor`: what this machine has and what the main job lacks, all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from cli import console

if TYPE_CHECKING:
    from entmtp_calib.stages.doctor import Finding

MAIN_JOB = "entmtp build-bank --task gsm8k"


def doctor(
    json: console.JsonFile = None,
) -> None:
    """Show what this machine has and what the main job lacks.

    The exit code is 1 if it lacks anything.
    """
    from entmtp_calib.stages.doctor import examine

    findings = examine()
    problems = [finding.problem for finding in findings if finding.problem]
    document = {"findings": findings, "ready": not problems}
    console.present(lambda: _print(findings, problems), document, json)
    if problems:
        raise typer.Exit(1)


def _print(findings: list[Finding], problems: list[str]) -> None:
    console.show_facts((finding.name, finding.value) for finding in findings)
    for problem in problems:
        console.write(f"problem: {console.printable(problem)}\n")
    if not problems:
        console.write(f"ready for the main job: {MAIN_JOB}\n")

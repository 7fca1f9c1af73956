"""The flags of settings: one for each; a value that can never work is one line that names it."""

from __future__ import annotations

from dataclasses import fields

import pytest
from toy_bank import run

from cli import options
from entmtp_calib.config import PRESETS, BuildConfig, TrainConfig, build_config


def test_every_setting_has_a_flag() -> None:
    assert {"task", *options.BUILD_HELP} == {field.name for field in fields(BuildConfig)}
    assert set(options.TRAIN_HELP) == {field.name for field in fields(TrainConfig)}
    for command, helps in (("build-bank", options.BUILD_HELP), ("train-heads", options.TRAIN_HELP)):
        text = run(command, "--help").stdout
        for name in helps:
            flag = options.FLAG_NAMES.get(name, f"--{name.replace('_', '-')}").split("/")[0]
            assert f"{flag} " in text


def test_the_help_has_the_values_of_the_presets() -> None:
    text = " ".join(run("build-bank", "--help").stdout.split())
    sizes = [f"{name} {build_config(name).search_prompts}" for name in PRESETS]
    assert f"[{', '.join(sizes)}]" in text


@pytest.mark.parametrize("command", ["build-bank", "rollout"])
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--task", "gsm9k"),
        ("--preset", "fast"),
        ("--search-prompts", "0"),
        ("--max-nodes", "0"),
        ("--max-rank", "33"),
        ("--context-length", "0"),
        ("--temperature", "nan"),
        ("--temperature", "-1"),
        ("--temperature", "inf"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--top-p", "nan"),
        ("--top-k", "-1"),
        ("--prompt-mode", "both"),
        ("--seed", "-1"),
    ],
)
def test_a_value_that_can_never_work_is_one_line_with_the_flag(
    command: str, flag: str, value: str
) -> None:
    result = run(command, f"{flag}={value}")
    assert (result.exit_code, result.stderr.count("\n"), result.stdout) == (2, 1, "")
    assert flag in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("build-bank", "--data", ""),
        ("build-bank", "--model", " "),
        ("build-bank", "--out", ""),
        ("build-bank", "--max-nodes", "many"),
        ("decode", "bank", "--heads", ""),
        ("recalibrate", "bank", "--max-nodes", "3"),
        ("train-heads", "--prompts", "gsm8k"),
    ],
)
def test_values_of_the_wrong_kind_and_unknown_flags_are_usage_errors(
    arguments: tuple[str, ...],
) -> None:
    assert run(*arguments).exit_code == 2

"""`entmtp verify`: silent on a lossless bank, loud on a decoder that is broken on purpose."""

from __future__ import annotations

import json
from typing import Any

import pytest
from toy_bank import Built, Switching, run

from entmtp_calib import decoding

SHORT = ("--prompts", 2, "--max-new-tokens", 10)


def test_a_lossless_bank_exits_with_0(switching: Switching) -> None:
    arguments = [*switching.arguments, "--data", switching.data, *SHORT]
    result = run("verify", *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["lossless"] is True
    # Four trees beside plain decoding and four policies, each greedy and sampled.
    assert document["texts"] == 2 * 2 * 8
    assert document["tokens_greedy"] == document["tokens_sampled"] == 2 * 8 * 10
    assert document["positions"] == 2 * 2 * 8 * 10
    assert document["positions_equal"] <= document["positions"]
    assert document["largest_difference"] < 1e-4


def test_the_prompts_are_the_banks_own(built: Built) -> None:
    result = run("verify", built.folder, *SHORT)
    assert result.exit_code == 0, result.output
    assert f"2 prompts from {built.arguments[-1]} (9 rows read)" in result.stdout
    assert result.stdout.endswith("lossless: every text is plain decoding's, token for token\n")


def test_a_broken_decoder_is_found_and_shown(
    switching: Switching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_the_first_draft(parents: Any, tokens: Any, choices: Any) -> list[int]:
        return [1] if len(tokens) > 1 else []

    monkeypatch.setattr(decoding, "accept", accept_the_first_draft)
    result = run("verify", *switching.arguments, "--data", switching.data, *SHORT)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("prompt "))
    shown = lines[start + 1].split()
    # The root is the target's own choice; the draft after it is the first that may be wrong.
    assert shown[:2] == ["[0]", "chain-2"]
    assert int(shown[4]) >= 1
    assert shown[5] != shown[6]
    assert float(shown[7]) > 0
    assert shown[8] == "3"
    # What stands behind a divergence is another text, and is not compared.
    compared = next(line for line in lines if line.startswith("logits"))
    assert "positions compared" in compared
    assert any(line.startswith("NOT lossless here: ") for line in lines)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--prompts", "0"), ("--max-new-tokens", "0"), ("--temperature", "0"), ("--top-p", "2")],
)
def test_a_value_that_can_never_work_is_a_usage_error(flag: str, value: str) -> None:
    result = run("verify", "no/bank", f"{flag}={value}")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert flag in result.stderr


def test_a_bank_alone_needs_data(switching: Switching) -> None:
    result = run("verify", *switching.arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--data" in result.stderr

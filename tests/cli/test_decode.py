"""`entmtp decode`: exactly the text on stdout, the same with every policy, figures on stderr."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from toy_bank import BUSHY, WIDE, Built, Switching, run

from entmtp_calib.config import SamplingConfig
from entmtp_calib.decoding import Decoder
from entmtp_calib.policy import Static
from entmtp_calib.targets.load import load_target
from entmtp_calib.tree import EMPTY

PROMPT = "List[int] d[key] [/b]"
POLICIES = ("static ladder hysteresis staged none hydra-default chain-2 " + BUSHY.id).split()
SAMPLED = ("--temperature", 4, "--top-p", 0.98, "--seed", 3)


@pytest.fixture(scope="module")
def expected(switching: Switching) -> str:
    """The sampled text by plain decoding, with nothing of the command line in between."""
    target = load_target(switching.model)
    ids = target.tokenizer.encode(PROMPT, add_special_tokens=False)
    sampling = SamplingConfig(4.0, 0.98, 0, 3)
    generated = Decoder(target, None, [EMPTY], sampling).generate(ids, Static(0), 40)
    return str(target.tokenizer.decode(generated.tokens, skip_special_tokens=True))


def decode(switching: Switching, *arguments: object, **named: Any) -> Any:
    result = run("decode", *switching.arguments, *arguments, **named)
    assert result.exit_code == 0, result.output
    return result


def test_stdout_is_exactly_the_text_with_every_policy(
    switching: Switching, expected: str, tmp_path: Path
) -> None:
    assert {"[/b]", "[red]", "List[int]", "\\", "é😀"} <= set(expected.split())
    used = {}
    for policy in POLICIES:
        file = tmp_path / f"{policy}.json"
        result = decode(
            *(switching, "--prompt", PROMPT, "--policy", policy, *SAMPLED),
            *("--max-new-tokens", 40, "--json", file),
        )
        assert result.stdout == f"{expected}\n", policy
        document = json.loads(file.read_text(encoding="utf-8"))
        [text] = document["texts"]
        assert text["text"] == expected
        assert len(text["tokens"]) == 40 == sum(s["emitted_tokens"] for s in text["steps"])
        used[policy] = set(document["share"])
    assert used["none"] == {"plain"}
    assert used["hydra-default"] == {"hydra-default"}
    assert used["ladder"] == {"plain", "chain-2", BUSHY.id}
    assert used["hysteresis"] == {"plain", BUSHY.id}
    assert used["staged"] == {"plain", "chain-2", BUSHY.id, WIDE.id}


def test_the_figures_are_one_line_on_stderr(switching: Switching, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = decode(switching, "--prompt", PROMPT, "--max-new-tokens", 9, "--json", file)
    figures = json.loads(file.read_text(encoding="utf-8"))
    line = result.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"9 tokens, [\d.]+ tokens/s decoding \(without the prompt's pass\), [\d.]+ emitted "
        r"tokens/step, [\d.]+ accepted draft tokens/step, policy auto: static, steps: .+ 100 %",
        line,
    )
    assert f"{9 / figures['steps']:.2f} emitted tokens/step" in line
    assert "\x1b" not in result.output


def test_typical_acceptance_says_that_it_is_not_lossless(
    switching: Switching, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    arguments = ("--prompt", PROMPT, *SAMPLED, "--max-new-tokens", 40, "--json", file)
    exact = decode(switching, *arguments)
    assert json.loads(file.read_text(encoding="utf-8"))["lossless"] is True
    assert "lossless" not in exact.stderr
    typical = decode(
        *(switching, *arguments, "--acceptance", "typical", "--epsilon", 0.01, "--alpha", 0.1)
    )
    assert typical.stderr.endswith(", typical acceptance: not lossless\n")
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["lossless"] is False
    assert document["acceptance"] == {"rule": "typical", "epsilon": 0.01, "alpha": 0.1}
    assert typical.stdout != f"{expected}\n" == exact.stdout


def test_json_can_be_alone_on_stdout(switching: Switching) -> None:
    result = decode(switching, "--prompt", PROMPT, "--max-new-tokens", 3, "--json", "-")
    document = json.loads(result.stdout)
    assert document["max_new_tokens"] == 3
    assert document["texts"][0]["steps"][-1]["tree"] is None  # its root alone ended the text


def test_stdin_is_a_prompt_without_its_last_line_end(switching: Switching) -> None:
    arguments = ("--raw", "--max-new-tokens", 5)
    given = decode(switching, "--prompt", PROMPT, *arguments)
    assert decode(switching, *arguments, text=f"{PROMPT}\n").stdout == given.stdout


def test_a_prompt_goes_through_a_template_by_name(switching: Switching) -> None:
    rendered = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. "
        f"USER: {PROMPT} ASSISTANT:"
    )
    named = decode(switching, "--prompt", PROMPT, "--prompt-mode", "vicuna", *SAMPLED).stdout
    assert named == decode(switching, "--prompt", rendered, "--raw", *SAMPLED).stdout
    raw = decode(switching, "--prompt", PROMPT, "--prompt-mode", "raw", *SAMPLED).stdout
    assert named != raw == decode(switching, "--prompt", PROMPT, "--raw", *SAMPLED).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt-mode", "llama"), "--prompt-mode llama; expected one of auto, chat, raw, "),
        (("--prompt-mode", "vicuna", "--raw"), "--prompt-mode with --raw; expected one of them"),
    ],
)
def test_a_mode_that_cannot_be_is_refused_before_any_work(
    arguments: tuple[str, ...], words: str, switching: Switching
) -> None:
    result = run("decode", *switching.arguments, "--prompt", PROMPT, *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert words in result.stderr


def test_several_prompts_are_separated_by_a_line(switching: Switching, tmp_path: Path) -> None:
    text_file, rows = tmp_path / "two.txt", tmp_path / "two.jsonl"
    text_file.write_text(f"{PROMPT}\r\n\n[red] :smile:", encoding="utf-8")
    prompts = [{"prompt": PROMPT}, {"messages": [{"role": "user", "content": "[red] :smile:"}]}]
    rows.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
    arguments = ("--max-new-tokens", 4, "--prompts-file")
    texts = decode(switching, *arguments, text_file)
    assert decode(switching, *arguments, rows).stdout == texts.stdout
    first, second = texts.stdout.split("---\n")
    alone = decode(switching, "--prompt", "[red] :smile:", "--max-new-tokens", 4)
    assert second == alone.stdout
    assert first.endswith("\n")
    assert texts.stderr.splitlines()[-1].startswith("8 tokens, ")


def test_what_is_not_as_measured_is_a_note(
    switching: Switching, monkeypatch: pytest.MonkeyPatch
) -> None:
    from entmtp_calib import provenance

    now = {**provenance.hardware(), "usable_cores": 999}
    monkeypatch.setattr(provenance, "hardware", lambda *_: now)
    result = decode(switching, "--prompt", PROMPT, "--max-new-tokens", 2)
    assert re.search(
        r"^note: not as measured: usable cores \d+ then, 999 now$", result.stderr, re.M
    )
    assert "entmtp recalibrate" in result.stderr


def test_a_run_folder_names_its_own_model_and_heads(built: Built) -> None:
    result = run("decode", built.folder, "--prompt", "t7", "--max-new-tokens", 5)
    assert result.stdout == "t8 t9 t10 t11 t12\n"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-new-tokens", "0"),
        ("--temperature", "nan"),
        ("--temperature", "-1"),
        ("--top-p", "0"),
        ("--top-k", "-1"),
        ("--prompts-file", "also"),
        ("--acceptance", "near"),
        ("--acceptance", "typical"),  # at temperature 0
        ("--epsilon", "0.1"),  # with exact acceptance
        ("--alpha", "nan"),
    ],
)
def test_a_value_that_can_never_work_is_a_usage_error(flag: str, value: str) -> None:
    result = run("decode", "no/bank", "--prompt", "text", f"{flag}={value}")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert flag in result.stderr


def test_an_unknown_policy_is_a_usage_error_that_lists_the_known(switching: Switching) -> None:
    result = run("decode", *switching.arguments, "--prompt", PROMPT, "--policy", "fast")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    policies = "auto, static, ladder, hysteresis, staged, none"
    trees = f"plain, chain-2, {BUSHY.id}, {WIDE.id}, hydra-default"
    assert f"--policy fast; expected one of {policies}, {trees}\n" in result.stderr


def test_no_text_to_go_on_from_is_one_line(tmp_path: Path) -> None:
    blank, latin = tmp_path / "blank.txt", tmp_path / "latin.txt"
    blank.write_text("\n \n")
    latin.write_bytes(b"caf\xe9")
    for arguments, text, reason in (
        (("--prompt", ""), None, "the prompt is empty"),
        (("--prompt", " \n"), None, "the prompt is empty"),
        (("--prompt", "\udcff"), None, "not valid Unicode"),
        ((), "", "the prompt is empty"),
        ((), b"\xff", "stdin, byte 1: not UTF-8"),
        (("--prompts-file", blank), None, "blank.txt is empty"),
        (("--prompts-file", latin), None, "latin.txt, byte 4: not UTF-8"),
        (("--prompts-file", tmp_path / "[/y].txt"), None, "cannot read"),
        (("--prompts-file", tmp_path / "no.jsonl"), None, "does not exist"),
    ):
        result = run("decode", "no/bank", *arguments, text=text)
        assert (result.exit_code, result.stderr.count("\n"), result.stdout) == (1, 1, ""), reason
        assert reason in result.stderr


def test_a_bank_alone_needs_its_model_and_heads(switching: Switching) -> None:
    result = run("decode", switching.bank, "--prompt", PROMPT)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "--model" in result.stderr

"""`entmtp import-heads`, and the published heads that `--heads` takes as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toys
from published_heads import HYDRA_CONFIG, HYDRA_PT, hydra_state, save_heads_file
from toy_bank import SMALL, run, write_prompts

from entmtp_calib.heads.native import load_heads
from entmtp_calib.targets.load import load_target


def test_it_says_what_it_found_and_writes_native_heads(tmp_path: Path) -> None:
    model = toys.save_rand(tmp_path / "model")
    config = {**HYDRA_CONFIG, "hydra_num_heads": 2}
    source = save_heads_file(tmp_path / "[published]", HYDRA_PT, hydra_state(), config)
    out = tmp_path / "[heads]"
    document = tmp_path / "import.json"
    result = run("import-heads", source, out, "--model", model, "--json", document)
    assert result.exit_code == 0, result.output
    facts = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert facts[0] == ["heads", "Hydra prefix-mlp, 4 heads of 4 layers"]
    assert facts[1] == ["made", "for  lmsys/vicuna-7b-v1.3"]
    assert facts[2] == ["sizes", "hidden 32, vocabulary 10"]
    assert facts[3][1].startswith(f"{out}, 0.1 MB of bfloat16")
    assert ["ignored", "input_embed_fn.weight"] in facts
    assert facts[-1] == ["note", "config.json says hydra_num_heads 2, the tensors are 4"]
    assert json.loads(document.read_text())["layout"] == "Hydra prefix-mlp"
    assert load_heads(out, load_target(model)).n_heads == 4


def test_what_is_no_heads_is_one_line(tmp_path: Path) -> None:
    result = run("import-heads", toys.save_rand(tmp_path / "model"), tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "is a language model without heads" in result.stderr
    assert run("import-heads", "", tmp_path / "out").exit_code == 2


def test_a_bank_is_built_and_decoded_with_published_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENTMTP_CACHE", str(tmp_path / "cache"))
    model = toys.save_rand(tmp_path / "model")
    source = save_heads_file(tmp_path / "published", HYDRA_PT, hydra_state(), HYDRA_CONFIG)
    words = [f"t{n}" for n in range(toys.RAND_VOCAB)]
    data = write_prompts(tmp_path / "prompts.jsonl", words, 7)
    bank = tmp_path / "bank"
    inputs = ("--model", model, "--heads", source, "--data", data, "--prompt-mode", "alpaca")
    built = run("build-bank", *SMALL, *inputs, "--out", bank)
    assert built.exit_code == 0, built.output
    shown = run("show", bank, "--json", "-")
    heads = json.loads(shown.stdout)["heads"]
    assert (heads["name"], heads["kind"], heads["n_heads"]) == ("published", "hydra", 4)
    decoded = run("decode", bank, "--prompt", "t1 t2", "--max-new-tokens", 6)
    assert decoded.exit_code == 0, decoded.output
    out = tmp_path / "imported"
    assert run("import-heads", source, out, "--model", model).exit_code == 0
    again = run("decode", bank, "--heads", out, "--prompt", "t1 t2", "--max-new-tokens", 6)
    assert again.stdout == decoded.stdout
    assert "heads" not in again.stderr, "the bank knows its heads again"

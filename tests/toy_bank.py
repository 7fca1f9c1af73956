"""The command line on toys: how tests call it, and what they call it on.

The words of `save_hostile` are what consoles like to eat or to choke on, so every text that a test
decodes with them is a test of printing too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import toys
from tokenizers import Tokenizer, models, pre_tokenizers
from toy_heads import random_heads, save_for
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from cli.main import app
from entmtp_calib.bank import Bank, BankEntry
from entmtp_calib.decoding import Decoder
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Staged, Static
from entmtp_calib.provenance import hardware
from entmtp_calib.signals import SignalSpec
from entmtp_calib.stages.setup import Inputs
from entmtp_calib.targets.load import load_target
from entmtp_calib.timing import Interval
from entmtp_calib.tree import EMPTY, Tree, chain

WORDS = ["[unk]", "List[int]", "a[1:]", "d[key]", "[/b]", "[red]", ":smile:", "\\", "é😀", "{x}"]
BUSHY = Tree.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
WIDE = Tree.of([*((rank,) for rank in range(5)), (0, 0), (3, 1)])
SMALL = """
    --task custom --search-prompts 3 --select-prompts 2 --report-prompts 2 --max-new-tokens 12
    --max-nodes 6 --max-candidates 3 --timing-rounds 1 --step-repetitions 3 --context-length 8
""".split()
"""Sizes of a bank that is built in seconds."""


@dataclass(frozen=True)
class Built:
    """A bank that the command line built on CYCLE with perfect heads, and how."""

    folder: Path
    arguments: Sequence[object]
    """All of build-bank's but --out."""
    stdout: str
    document: Path
    """What --json wrote."""


@dataclass(frozen=True)
class Switching:
    """A bank without a run folder, with model, heads and prompts whose words are hostile."""

    bank: Path
    model: Path
    heads: Path
    data: Path

    @property
    def arguments(self) -> list[object]:
        """What decode and verify need first."""
        return [self.bank, "--model", self.model, "--heads", self.heads]


def run(*arguments: object, text: str | bytes | None = None) -> Result:
    """Call the command line in this process; `text` is its stdin."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def interrupt_generating(patch: pytest.MonkeyPatch, call: int) -> None:
    """Cut decoding short at this call of `Decoder.generate`, counted from 1."""
    generate, calls = Decoder.generate, 0

    def interrupt(self: Decoder, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return generate(self, *arguments, **named)

    patch.setattr(Decoder, "generate", interrupt)


def save_inputs(folder: Path, n_heads: int, n_prompts: int) -> Inputs:
    """What a run on RAND with random heads is made from."""
    model, target = toys.save_rand(folder / "model"), toys.rand()
    heads = save_for(random_heads(target, n_heads=n_heads), target, folder / "heads")
    data = write_prompts(folder / "data.jsonl", [f"t{n}" for n in range(10)], n_prompts)
    return Inputs(str(model), str(heads), str(data))


def write_prompts(file: Path, words: list[str], count: int) -> Path:
    """A `custom` data file of short prompts, none twice."""
    draw = random.Random(0)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[" ".join(draw.choices(words, k=4 + len(prompts) % 3))] = None
    rows = [json.dumps({"id": f"[{n}]", "prompt": prompt}) for n, prompt in enumerate(prompts)]
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


def save_hostile(folder: Path) -> tuple[Path, Path]:
    """RAND with `WORDS` for its vocabulary, and random Hydra heads for it: two folders."""
    model = toys.save_rand(folder / "model")
    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=WORDS[0]).save_pretrained(model)
    target = load_target(model)
    return model, save_for(random_heads(target, n_heads=4), target, folder / "heads")


def save_switching_bank(file: Path) -> Path:
    """A bank made by hand for `save_hostile`; its policies use all trees, one of them an extra."""
    ones = Interval(1.0, 1.0, 1.0)
    frontier, extras = (EMPTY, chain(2), BUSHY), (WIDE,)
    Bank(
        task="custom",
        model={"name": "model", "vocab_size": len(WORDS)},
        heads={"name": "heads", "n_heads": 4},
        entries=tuple(BankEntry(tree, ones, 1.0, ones, ones) for tree in frontier),
        extras=tuple(BankEntry(tree, ones, 1.0, ones, ones) for tree in extras),
        policies={
            "static": Static(2),
            "ladder": Ladder(SignalSpec("path_value", 1), (0.18, 0.28), (0, 1, 2)),
            "hysteresis": Hysteresis(SignalSpec("base_top1"), 0, 2, 0.7, 0.5),
            "staged": Staged(((), (0.4,), (0.15, 0.25)), ((DRAFT_ON,), (0, DRAFT_ON), (1, 3, 2))),
        },
        best=2,
        auto="static",
        hardware=hardware(),
    ).save(file)
    return file

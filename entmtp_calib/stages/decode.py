"""Decode: a bank with its target and heads, and text with any of its policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entmtp_calib.bank import Bank
from entmtp_calib.config import AcceptanceConfig, DecodeConfig, SamplingConfig
from entmtp_calib.decoding import Decoder, Generation
from entmtp_calib.errors import ArtifactError, UsageError
from entmtp_calib.heads.model import Heads
from entmtp_calib.policy import Policy, Static
from entmtp_calib.prompts import Prompt, encode
from entmtp_calib.stages.grow import reference_trees
from entmtp_calib.stages.setup import (
    Inputs,
    heads_facts,
    model_facts,
    open_heads,
    read_settings,
    run_folder_of,
)
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.tree import EMPTY, Tree

PLAIN, AUTO = "none", "auto"


@dataclass(frozen=True)
class Session:
    """A bank with the target and heads that it was measured with, ready to decode."""

    bank: Bank
    target: Target
    heads: Heads
    trees: tuple[Tree, ...]
    """The bank's trees, and Hydra's default where the heads can draft it."""
    prompt_mode: str
    differences: tuple[str, ...]
    """What is not as it was when the bank was measured; the text is right all the same."""

    def decoder(
        self,
        sampling: SamplingConfig | None = None,
        acceptance: AcceptanceConfig | None = None,
    ) -> Decoder:
        """A decoder over `trees`; lossless unless another acceptance is asked for."""
        return Decoder(self.target, self.heads, self.trees, sampling, acceptance)

    def policy(self, name: str) -> Policy:
        """The policy of this name.

        Args:
            name: auto (the bank's choice), static, ladder, hysteresis, staged, none (plain
                decoding), hydra-default, or a tree's id.
        """
        name = self.bank.auto if name == AUTO else name
        if name in self.bank.policies:
            return self.bank.policies[name]
        wanted = EMPTY.id if name == PLAIN else name
        ids = [tree.id for tree in self.trees]
        if wanted in ids:
            return Static(ids.index(wanted))
        known = [AUTO, *self.bank.policies, PLAIN, *ids]
        raise UsageError(f"--policy {name}", f"one of {', '.join(known)}")

    def encode(self, prompt: Prompt | str, mode: str | None = None) -> list[int]:
        """Token ids of a prompt, or of the text of one, by the one encoder."""
        if isinstance(prompt, str):
            prompt = Prompt("prompt", (("user", prompt),))
        return encode(self.target.tokenizer, prompt.messages, mode or self.prompt_mode)


def open_session(bank_path: str | Path, changes: Inputs | None = None) -> Session:
    """Load a bank with its model and heads.

    Args:
        bank_path: a run folder, or a bank file (inside its run folder, or with `changes`).
        changes: a model, heads, device, dtype or engine other than the run's.

    Raises:
        HeadsError: the heads cannot draft the bank's trees, or are not the target's.
    """
    bank = Bank.load(bank_path)
    inputs = session_inputs(Path(bank_path), bank, changes or Inputs())
    target = load_target(
        inputs.model, device=inputs.device, dtype=inputs.dtype, engine=inputs.engine
    )
    heads, facts = open_heads(inputs.heads, target)
    return session_of(bank, target, heads, facts)


def session_of(
    bank: Bank, target: Target, heads: Heads, facts: Mapping[str, Any] | None = None
) -> Session:
    """A session of what is loaded already.

    Args:
        facts: of the heads, where more is known than the heads themselves can say.

    Raises:
        HeadsError: the heads cannot draft the bank's trees, or are not the target's.
    """
    differences = bank.check_against(model_facts(target), facts or heads_facts(heads))
    trees = list(bank.trees)
    extra = reference_trees(heads.n_heads, heads.n_ranks)
    trees += [tree for tree in extra if tree not in trees]
    mode = bank.splits.get("data", {}).get("prompt_mode", "auto")
    return Session(bank, target, heads, tuple(trees), mode, tuple(differences))


def session_inputs(bank_path: Path, bank: Bank, changes: Inputs) -> Inputs:
    """What target and heads are loaded from: the inputs of the bank's run, with the changes.

    Raises:
        ArtifactError: a lone bank file, and no model and heads are named.
    """
    if folder := run_folder_of(bank_path):
        usual = Inputs()
        changed = {n: v for n, v in vars(changes).items() if v != getattr(usual, n)}
        return replace(read_settings(folder)[1], **changed)
    if changes.model and changes.heads:
        return changes
    raise ArtifactError(
        f"{bank_path} stands alone, without the run.json of its run",
        "its run folder, which names model and heads",
        f"pass --model and --heads (it was measured with {bank.model.get('name')})",
    )


class Streamer:
    """Text of token ids as they come, with nothing shown before it is certain.

    Bytes of an unfinished character are held back until it is whole; `finish` gives what is left.
    The pieces joined are exactly `tokenizer.decode(ids)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids make certain."""
        self._ids += ids
        text = self._text()
        # An unfinished character decodes to U+FFFD at the end.
        sure = len(text.rstrip("\ufffd"))
        piece = text[self._shown : sure] if sure > self._shown else ""
        self._shown = max(self._shown, sure)
        return piece

    def finish(self) -> str:
        """What was held back."""
        return self._text()[self._shown :]

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))


@dataclass(frozen=True)
class Decoded:
    """A prompt's text and how it came about."""

    prompt: Prompt
    text: str
    generation: Generation


def decode_prompts(
    session: Session,
    prompts: Sequence[Prompt],
    policy: Policy,
    config: DecodeConfig,
    mode: str | None = None,
    on_text: Callable[[Prompt, str], None] | None = None,
) -> Iterator[Decoded]:
    """Decode prompts one after the other; `on_text` sees each piece of text as it is accepted."""
    decoder = session.decoder(config.sampling, config.acceptance)
    for prompt in prompts:
        streamer = Streamer(session.target.tokenizer)
        pieces: list[str] = []

        def take(piece: str, prompt: Prompt = prompt, pieces: list[str] = pieces) -> None:
            pieces.append(piece)
            if on_text and piece:
                on_text(prompt, piece)

        generated = decoder.generate(
            session.encode(prompt, mode),
            policy,
            config.max_new_tokens,
            on_tokens=lambda ids, streamer=streamer, take=take: take(streamer.add(ids)),  # type: ignore[misc]
        )
        take(streamer.finish())
        yield Decoded(prompt, "".join(pieces), generated)


def summary(decoded: Sequence[Decoded], trees: Sequence[Tree]) -> dict[str, Any]:
    """The figures of some texts together: tokens, rates, acceptance, share of steps per tree."""
    steps = [step for text in decoded for step in text.generation.steps]
    tokens = sum(len(text.generation.tokens) for text in decoded)
    decode_seconds = sum(text.generation.decode_seconds for text in decoded)
    prefill_seconds = sum(text.generation.prefill_seconds for text in decoded)
    with_pass = [tree for text in decoded for tree in text.generation.chosen]
    return {
        "prompts": len(decoded),
        "tokens": tokens,
        "steps": len(steps),
        "decode_seconds": decode_seconds,
        "prefill_seconds": prefill_seconds,
        "decode_tokens_per_second": tokens / decode_seconds if decode_seconds else None,
        "tokens_per_second": tokens / (decode_seconds + prefill_seconds),
        "mean_emitted_tokens": tokens / len(steps),
        "mean_accepted_draft_tokens": tokens / len(steps) - 1,
        "switches": sum(text.generation.switches for text in decoded),
        "share": {
            tree.id: with_pass.count(index) / len(with_pass)
            for index, tree in enumerate(trees)
            if index in with_pass
        },
    }

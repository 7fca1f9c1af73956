"""Verify: every tree and policy, greedy and sampled, must write plain decoding's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from entmtp_calib.bank import Bank
from entmtp_calib.config import SamplingConfig
from entmtp_calib.decoding import Generation
from entmtp_calib.policy import Policy, Static
from entmtp_calib.progress import Progress, Silent
from entmtp_calib.prompts import Prompt, PromptSet, load_prompts
from entmtp_calib.sampling import noisy_scores
from entmtp_calib.stages.decode import PLAIN, Session
from entmtp_calib.stages.setup import read_settings, run_folder_of
from entmtp_calib.targets.model import Target
from entmtp_calib.tree import EMPTY


@dataclass(frozen=True)
class Divergence:
    """Where a text first differs from plain decoding's, and how near the choice was."""

    prompt: str
    method: str
    sampling: SamplingConfig
    position: int
    """0-based in the generated text."""
    expected: int | None
    found: int | None
    logit_gap: float
    """How far plain decoding's token is ahead of the other; NaN where a text ends.

    A difference of logits; when sampling, with the noise of the draw, in the same unit.
    """
    rows: int
    """Rows of the pass that chose the differing token."""


@dataclass(frozen=True)
class Verification:
    """How much was compared, and every first divergence."""

    texts: int
    tokens: int
    tokens_greedy: int
    tokens_sampled: int
    positions: int
    """Passes' rows whose logits were compared with plain decoding's at the same place."""
    positions_equal: int
    """Of these, those with the same bits; where all are, no near-tie can fall otherwise."""
    largest_difference: float
    """Of two logits of the same token at the same place."""
    divergences: tuple[Divergence, ...]


class _Logits:
    """Observes a text's logits, or compares them with those of another text.

    Args:
        expected: rows [V] of plain decoding; None to remember the rows seen.
    """

    def __init__(self, expected: Sequence[torch.Tensor] | None = None) -> None:
        self._expected = expected
        self.rows: list[torch.Tensor] = []
        self.differences: list[float] = []

    def __call__(self, _vectors: torch.Tensor, logits: torch.Tensor) -> None:
        if self._expected is None:
            self.rows += logits.clone().unbind()
            return
        expected = self._expected[len(self.differences) :]
        for mine, other in zip(logits, expected, strict=False):
            is_same = torch.equal(mine, other)
            self.differences.append(0.0 if is_same else float((mine - other).abs().max()))


def bank_prompts(
    bank_path: Path, limit: int, task: str | None = None, data: str | None = None
) -> PromptSet:
    """The first prompts of the data that a bank was built on, or of another task or file."""
    bank = Bank.load(bank_path)
    folder = run_folder_of(bank_path)
    if data is None and task in (None, bank.task) and folder:
        data = read_settings(folder)[1].data
    return load_prompts(task or bank.task, Path(data) if data else None, limit)


def verify(
    session: Session,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    sampled: SamplingConfig,
    progress: Progress | None = None,
) -> Verification:
    """Decode with every tree and policy, greedy and sampled, and compare with plain decoding.

    Args:
        sampled: the sampling beside greedy decoding; its seed changes with each prompt.
    """
    progress = progress or Silent()
    methods: dict[str, Policy] = {tree.id: Static(i) for i, tree in enumerate(session.trees)}
    methods |= {f"policy {name}": policy for name, policy in session.bank.policies.items()}
    del methods[EMPTY.id]
    progress.start("verifying", 2 * len(prompts) * len(methods))
    tokens = {"greedy": 0, "sampled": 0}
    differences: list[float] = []
    divergences = []
    for number, prompt in enumerate(prompts):
        ids = session.encode(prompt)
        for kind in tokens:
            settings = SamplingConfig() if kind == "greedy" else _with_seed(sampled, number)
            decoder = session.decoder(settings)
            seen = _Logits()
            plain = decoder.generate(ids, session.policy(PLAIN), max_new_tokens, observer=seen)
            for name, policy in methods.items():
                compared = _Logits(seen.rows)
                other = decoder.generate(ids, policy, max_new_tokens, observer=compared)
                tokens[kind] += len(other.tokens)
                same = len(plain.tokens)
                if other.tokens != plain.tokens:
                    found = _first_divergence(session, ids, plain, other, settings)
                    divergences.append(Divergence(prompt.id, name, settings, **found))
                    same = divergences[-1].position
                # The row that chose the first other token still follows the same text.
                differences += compared.differences[: same + 1]
                progress.advance(1, f"{sum(tokens.values())} tokens, {len(divergences)} differ")
    progress.done()
    return Verification(
        texts=2 * len(prompts) * len(methods),
        tokens=sum(tokens.values()),
        tokens_greedy=tokens["greedy"],
        tokens_sampled=tokens["sampled"],
        positions=len(differences),
        positions_equal=differences.count(0.0),
        largest_difference=max(differences, default=0.0),
        divergences=tuple(divergences),
    )


def _with_seed(sampling: SamplingConfig, number: int) -> SamplingConfig:
    return SamplingConfig.from_dict({**sampling.to_dict(), "seed": sampling.seed + number})


def _first_divergence(
    session: Session,
    prompt_ids: Sequence[int],
    plain: Generation,
    other: Generation,
    sampling: SamplingConfig,
) -> dict[str, Any]:
    pairs = zip(plain.tokens, other.tokens, strict=False)
    shorter = min(len(plain.tokens), len(other.tokens))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    expected = plain.tokens[at] if at < len(plain.tokens) else None
    found = other.tokens[at] if at < len(other.tokens) else None
    place = len(prompt_ids) + at
    gap = float("nan")
    if expected is not None and found is not None:
        logits = _plain_logits(session.target, [*prompt_ids, *plain.tokens[:at]])
        gap = logit_gap(logits, place, sampling, expected, found)
    rows = next(
        (s.rows for s in other.steps if s.position < place <= s.position + s.emitted_tokens),
        len(prompt_ids),
    )
    return {
        "position": at,
        "expected": expected,
        "found": found,
        "logit_gap": gap,
        "rows": rows,
    }


def logit_gap(
    logits: torch.Tensor, position: int, sampling: SamplingConfig, expected: int, found: int
) -> float:
    """By how much one token [V] wins over another at a position, in logits; see `Divergence`."""
    if sampling.temperature == 0:
        return float(logits[expected] - logits[found])
    scores = noisy_scores(logits[None], [position], sampling)[0]
    return float(scores[expected] - scores[found]) * sampling.temperature


def _plain_logits(target: Target, ids: Sequence[int]) -> torch.Tensor:
    cache = target.new_cache(len(ids))
    hidden = target.forward(list(ids), list(range(len(ids))), cache)
    return target.logits(hidden[-1:])[0]

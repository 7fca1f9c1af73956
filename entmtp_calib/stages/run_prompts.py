"""The prompts of a run: split, encoded as the target gets them, and what is noted of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from entmtp_calib.config import BuildConfig
from entmtp_calib.errors import DataError
from entmtp_calib.prompts import PromptSet, Splits, encode, resolve_mode, split
from entmtp_calib.stages.recorded import SPLITS
from entmtp_calib.targets.model import Target


@dataclass(frozen=True)
class Encoded:
    """A prompt as the target gets it."""

    id: str
    ids: tuple[int, ...]


def split_prompts(prompts: PromptSet, config: BuildConfig) -> Splits:
    """The splits; where there are too few prompts, the error says what became of the others."""
    sizes = (config.search_prompts, config.select_prompts, config.report_prompts)
    try:
        return split(prompts.prompts, sizes, config.seed)
    except DataError as error:
        found = f"{error.found} in {prompts.source} ({prompts.counts()})"
        raise DataError(found, error.expected, error.action) from None


def encoded_splits(
    kept: PromptSet, config: BuildConfig, target: Target
) -> dict[str, tuple[Encoded, ...]]:
    """Every split's prompts, by the one encoder."""
    parts = split_prompts(kept, config)
    return {
        name: tuple(
            Encoded(p.id, tuple(encode(target.tokenizer, p.messages, config.prompt_mode)))
            for p in getattr(parts, name)
        )
        for name in SPLITS
    }


def data_facts(kept: PromptSet, config: BuildConfig, target: Target) -> dict[str, Any]:
    """What a bank remembers of its prompts."""
    return {
        "source": kept.source,
        "sha256": kept.sha256,
        "description": kept.describe(),
        "prompt_mode": resolve_mode(target.tokenizer, config.prompt_mode),
    }

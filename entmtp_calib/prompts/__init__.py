"""Calibration prompts: load them, split them, encode them.

    load_prompts(task, data, limit) -> PromptSet      values, rows, read, hub, sources, load
    split(prompts, sizes, seed) -> Splits             disjoint search, select, report
    encode(tokenizer, messages, mode) -> ids          the only encoder

The rest of the package sees only these names; it knows no file format and no data set.
"""

from __future__ import annotations

from entmtp_calib.prompts.encode import encode, keep_short, resolve_mode
from entmtp_calib.prompts.load import TASKS, load_prompts
from entmtp_calib.prompts.split import Splits, split
from entmtp_calib.prompts.values import Messages, Prompt, PromptSet

__all__ = [
    "TASKS",
    "Messages",
    "Prompt",
    "PromptSet",
    "Splits",
    "encode",
    "keep_short",
    "load_prompts",
    "resolve_mode",
    "split",
]

"""HumanEval: Python functions to complete from a signature and a docstring."""

from __future__ import annotations

from entmtp_calib.prompts.rows import Row
from entmtp_calib.prompts.values import Messages

INSTRUCTION = "Complete this Python function."


def messages(row: Row) -> Messages:
    """The field `prompt` in a code block under a line of instruction."""
    stub = row.text("prompt").strip("\r\n")
    return (("user", f"{INSTRUCTION}\n\n```python\n{stub}\n```"),)

"""GSM8K: grade-school arithmetic in words; the prompt is the question, as it stands."""

from __future__ import annotations

from entmtp_calib.prompts.rows import Row
from entmtp_calib.prompts.values import Messages


def messages(row: Row) -> Messages:
    """The field `question`; `answer` is not needed to measure drafting."""
    return (("user", row.text("question")),)

"""ShareGPT: real conversations; the prompt is a chat up to and with its first user turn."""

from __future__ import annotations

from entmtp_calib.prompts.chat import conversation
from entmtp_calib.prompts.rows import Row
from entmtp_calib.prompts.values import Messages

FIELDS = ("conversations", "messages", "items")


def messages(row: Row) -> Messages:
    """System message, if any, and first user turn; the answers in the file are not used."""
    turns = conversation(row, FIELDS)
    first = [role for role, _ in turns].index("user")
    return turns[: first + 1]

"""A user's own file: `prompt` (text) or `messages` (a conversation) in each row."""

from __future__ import annotations

from entmtp_calib.prompts.chat import conversation
from entmtp_calib.prompts.rows import Row
from entmtp_calib.prompts.values import Messages


def messages(row: Row) -> Messages:
    """`messages` up to and with its last user turn unless it is null or empty, or else `prompt`."""
    if not {"prompt", "messages"} & row.fields.keys():
        raise row.missing("the field 'prompt' (a string) or 'messages' (a list of turns)")
    if not row.fields.get("messages") and "prompt" in row.fields:
        return (("user", row.text("prompt")),)
    turns = conversation(row, ("messages",))
    return turns if turns[-1][0] == "user" else turns[:-1]

"""From a row to messages: what each task takes, what it drops, what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from entmtp_calib.errors import DataError
from entmtp_calib.prompts import custom, gsm8k, humaneval, sharegpt
from entmtp_calib.prompts.rows import Row, SkipRow
from entmtp_calib.prompts.values import Messages

HI, OK, BE = ("user", "Hi"), ("assistant", "Ok"), ("system", "Be kind")


def row(**fields: Any) -> Row:
    return Row("d.jsonl, row 7", fields)


def turns(text: str, **renamed: str) -> list[dict[str, str]]:
    """'human:Hi gpt:Ok' as a list of turns."""
    pairs = (turn.split(":") for turn in text.split(" "))
    return [{"from": role, "value": words.replace("_", " ")} for role, words in pairs]


def chat(text: str) -> Messages:
    return sharegpt.messages(row(conversations=turns(text)))


def test_a_question_is_taken_as_it_stands() -> None:
    text = "How many?\u2028 [b]two[/b]\n"
    assert gsm8k.messages(row(question=text, answer="#### 2")) == (("user", text),)


def test_a_stub_stands_in_a_code_block() -> None:
    messages = humaneval.messages(row(task_id="x", prompt="\ndef f():\n    '''one'''\n\n"))
    block = "```python\ndef f():\n    '''one'''\n```"
    assert messages == (("user", f"{humaneval.INSTRUCTION}\n\n{block}"),)


@pytest.mark.parametrize("blank", [None, "", "  \n"])
def test_a_row_without_text_is_dropped_with_its_reason(blank: str | None) -> None:
    with pytest.raises(SkipRow, match="empty 'question'"):
        gsm8k.messages(row(question=blank))


def test_half_of_a_surrogate_pair_is_dropped() -> None:
    with pytest.raises(SkipRow, match="Unicode"):
        gsm8k.messages(row(question="smile \ud83d"))


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"q": "x", "a": "y"}, ["row has the fields q, a", "'question'"]),
        ({}, ["(none)"]),
        ({"question": 5}, ["'question': found the number 5", "a string"]),
        ({"question": ["a"]}, ["a list"]),
        ({"question": b"a"}, ["type bytes"]),
        ({str(n): n for n in range(20)}, ["6, 7, ..."]),
    ],
)
def test_another_schema_is_an_error_with_row_and_field(
    fields: dict[str, Any], facts: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        gsm8k.messages(row(**fields))
    for fact in ["d.jsonl, row 7", *facts]:
        assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("human:Hi gpt:Ok human:More", (HI,)),
        ("human:Hi", (HI,)),
        ("gpt:Ok human:Hi gpt:Ok", (HI,)),
        ("system:Be_kind human:Hi gpt:Ok", (BE, HI)),
        ("gpt:Ok system:Be_kind human:Hi", (BE, HI)),
        ("system:Be system:kind human:Hi", (("system", "Be\n\nkind"), HI)),
        ("human:Hi human:you gpt:Ok", (("user", "Hi\n\nyou"),)),
        ("human:Hi system:Be_kind human:you", (("user", "Hi\n\nyou"),)),
        ("Human:Hi chatgpt:Ok", (HI,)),
        ("user:Hi bing:Ok", (HI,)),
        ("human: human:Hi", (HI,)),
        (" ".join(["human:Hi gpt:Ok"] * 40), (HI,)),
    ],
)
def test_a_chat_is_cut_after_its_first_user_turn(text: str, expected: Messages) -> None:
    assert chat(text) == expected


@pytest.mark.parametrize("text", ["gpt:Ok", "system:Be_kind gpt:Ok", "human:", "gpt:Ok human:_"])
def test_a_chat_without_a_user_turn_is_dropped(text: str) -> None:
    with pytest.raises(SkipRow, match="no user turn"):
        chat(text)


def test_an_unknown_role_drops_the_row() -> None:
    with pytest.raises(SkipRow, match=r"unknown role \(tool\)"):
        chat("human:Hi tool:x")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"items": [{"from": "human", "value": "Hi"}]},
        {"conversations": None, "messages": [{"role": "user", "content": "Hi"}]},
        {"conversations": {"from": ["human", "gpt"], "value": ["Hi", "Ok"]}},
        {"conversations": json.dumps(turns("human:Hi gpt:Ok"))},
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"role": "assistant", "content": "Ok"},
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "Hi", "role": None, "content": None},
                {"from": None, "value": None, "role": "assistant", "content": "Ok"},
            ]
        },
    ],
)
def test_all_conventions_give_the_same_prompt(fields: dict[str, Any]) -> None:
    assert sharegpt.messages(row(**fields)) == (HI,)


@pytest.mark.parametrize("empty", [None, [], "", {}])
def test_null_and_empty_conversations_are_dropped_alike(empty: object) -> None:
    with pytest.raises(SkipRow, match="no turns"):
        sharegpt.messages(row(conversations=empty))


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"text": "Hi"}, "'conversations' or 'messages' or 'items'"),
        ({"conversations": "Hi"}, "field 'conversations': found the text 'Hi'"),
        ({"conversations": "[oops"}, "a JSON list of turns"),
        ({"conversations": ["Hi"]}, "field 'conversations[0]': found the text 'Hi'"),
        ({"conversations": [{"value": "Hi"}]}, "'from' or 'role'"),
        ({"conversations": [{"from": "human"}]}, "'value' or 'content'"),
        ({"conversations": [{"from": "human", "value": 3}]}, "'conversations[0].value'"),
        ({"conversations": [{"from": 3, "value": "Hi"}]}, "'conversations[0].from'"),
        ({"conversations": {"from": ["human"], "value": []}}, "columns of one length"),
    ],
)
def test_a_malformed_chat_is_an_error_that_names_the_turn(
    fields: dict[str, Any], fact: str
) -> None:
    with pytest.raises(DataError) as caught:
        sharegpt.messages(row(**fields))
    assert fact in str(caught.value)
    assert "row 7" in str(caught.value)


def test_a_custom_row_is_a_prompt_or_messages() -> None:
    chat = turns("system:Be_kind human:Hi gpt:Ok human:More gpt:Ok")
    assert custom.messages(row(prompt="Hi")) == (HI,)
    for empty in (None, [], ""):
        assert custom.messages(row(prompt="Hi", messages=empty)) == (HI,)
    assert custom.messages(row(prompt=None, messages=chat)) == (BE, HI, OK, ("user", "More"))
    with pytest.raises(SkipRow):
        custom.messages(row(prompt=None, messages=None))
    with pytest.raises(DataError, match=r"'prompt' \(a string\) or 'messages'"):
        custom.messages(row(text="Hi"))

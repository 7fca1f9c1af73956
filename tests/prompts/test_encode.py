"""The one encoder: exactly one BOS, and templates of every temper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entmtp_calib.config import PROMPT_MODES
from entmtp_calib.errors import DataError, ModelError, UsageError
from entmtp_calib.prompts import Prompt, PromptSet, encode, keep_short, resolve_mode
from entmtp_calib.prompts.templates import TEMPLATES

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

USER = (("user", "Hi you"),)
WITH_SYSTEM = (("system", "Be kind"), ("user", "Hi you"))
TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
SILENT = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def tokenizer(template: str | None = None, single: str = "<s> $A") -> Any:
    """One token per byte; `single` is the post-processing, with <s> = BOS and </s> = EOS."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate(letters)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>", "<g>"])
    marks = [(mark, core.token_to_id(mark)) for mark in ("<s>", "</s>", "<g>")]
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=marks
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = template
    return fast


def text(tok: Any, messages: Any = USER, mode: str = "auto") -> str:
    return tok.decode(encode(tok, messages, mode))


@pytest.mark.parametrize("template", ["{{ bos_token }}" + TURNS, TURNS])
def test_a_chat_has_exactly_one_bos(template: str) -> None:
    assert text(tokenizer(template)) == "<s>[user] Hi you"


def test_raw_text_has_exactly_one_bos_even_if_it_brings_one() -> None:
    assert text(tokenizer("{{ bos_token }}" + TURNS), mode="raw") == "<s>Hi you"
    assert text(tokenizer(), (("user", "<s>Hi"),)) == "<s>Hi"
    assert text(tokenizer(), (("user", "<s>"),)) == "<s>"


def test_no_bos_is_added_where_the_tokenizer_adds_none() -> None:
    assert text(tokenizer(TURNS, single="$A")) == "[user] Hi you"
    assert text(tokenizer(single="$A")) == "Hi you"


def test_an_end_token_of_the_tokenizer_never_closes_a_prompt() -> None:
    assert text(tokenizer(single="<s> $A </s>")) == "<s>Hi you"


def test_a_prefix_of_two_tokens_is_kept_whole_and_single() -> None:
    assert text(tokenizer(single="<g> <s> $A")) == "<g><s>Hi you"
    assert text(tokenizer("<g><s>" + TURNS, single="<g> <s> $A")) == "<g><s>[user] Hi you"


def test_the_template_is_asked_for_an_answer() -> None:
    assert text(tokenizer(STRICT)) == "<s><user>Hi you<model>"


@pytest.mark.parametrize("template", [STRICT, SILENT])
def test_a_system_message_the_template_refuses_or_loses_is_folded(template: str) -> None:
    assert text(tokenizer(template), WITH_SYSTEM).startswith("<s><user>Be kind\n\nHi you")


def test_a_system_message_the_template_takes_stays() -> None:
    assert text(tokenizer(TURNS), WITH_SYSTEM) == "<s>[system] Be kind[user] Hi you"


def test_without_a_template_the_plain_form_is_blank_lines() -> None:
    assert text(tokenizer(), WITH_SYSTEM) == "<s>Be kind\n\nHi you"
    assert resolve_mode(tokenizer()) == "raw"
    assert resolve_mode(tokenizer(TURNS)) == "chat"


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('never') }}", "{{ 1 / 0 }}"])
def test_a_broken_template_is_one_line_that_names_it(template: str, tmp_path: Path) -> None:
    tok = tokenizer(template)
    tok.name_or_path = str(tmp_path)
    with pytest.raises(ModelError, match=r"the chat template of .*fails") as caught:
        encode(tok, USER)
    assert "\n" not in str(caught.value)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=r"chat_template\.jinja fails"):
        encode(tok, USER)


def test_a_template_cannot_reach_the_system() -> None:
    reach = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ModelError, match="unsafe"):
        encode(tokenizer(reach), USER)


def test_a_chat_mode_without_template_and_an_unknown_mode_are_refused() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        encode(tokenizer(), USER, "chat")
    with pytest.raises(UsageError, match="auto, chat, raw"):
        encode(tokenizer(), USER, "plain")


SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
TALK = (("user", "Hi"), ("assistant", "Hello."), ("user", "So?"))


def test_every_mode_but_the_general_ones_is_a_template_by_name() -> None:
    assert set(TEMPLATES) == set(PROMPT_MODES) - {"auto", "chat", "raw"}


@pytest.mark.parametrize(
    ("mode", "messages", "expected"),
    [
        ("vicuna", USER, f"<s>{SYSTEM} USER: Hi you ASSISTANT:"),
        ("vicuna", TALK, f"<s>{SYSTEM} USER: Hi ASSISTANT: Hello.</s>USER: So? ASSISTANT:"),
        ("vicuna", WITH_SYSTEM, "<s>Be kind USER: Hi you ASSISTANT:"),
        (
            "alpaca",
            USER,
            "<s>Below is an instruction that describes a task. Write a response that appropriately"
            " completes the request.\n\n### Instruction:\nHi you\n\n### Response:\n",
        ),
        (
            "chatml",
            WITH_SYSTEM,
            "<s><|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi you<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ],
)
@pytest.mark.parametrize("own", [None, TURNS])
def test_a_template_by_name_is_used_whatever_the_model_has(
    mode: str, messages: Any, expected: str, own: str | None
) -> None:
    assert text(tokenizer(own), messages, mode) == expected


@pytest.mark.parametrize(
    ("origin", "mode"),
    [
        ("/cache/models--lmsys--vicuna-7b-v1.3/snapshots/abc", "vicuna"),
        ("/models/Vicuna-13B", "vicuna"),
        ("/home/vicuna/models/llama", "raw"),
        ("", "raw"),
    ],
)
def test_auto_knows_vicunas_template_by_the_models_name(origin: str, mode: str) -> None:
    tok = tokenizer()
    tok.name_or_path = origin
    assert resolve_mode(tok) == mode
    own = tokenizer(TURNS)
    own.name_or_path = origin
    assert resolve_mode(own) == "chat"


def test_an_empty_raw_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        encode(tokenizer(), (("user", ""),))


def test_todays_date_does_not_change_the_prompt() -> None:
    dated = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}" + TURNS
    assert text(tokenizer(dated)) == "<s>26 Jul 2024[user] Hi you"


def test_text_is_not_changed_by_encoding() -> None:
    odd = "Café\u2028 123  😊\r\n\ttwo  spaces "
    assert text(tokenizer(), (("user", odd),)) == "<s>" + odd


def test_prompts_that_are_too_long_are_dropped_and_counted() -> None:
    tok = tokenizer()
    prompts = (Prompt("a", (("user", "x" * 9),)), Prompt("b", (("user", "x" * 10),)))
    found = PromptSet(prompts, "d.jsonl", read=3, duplicates=1)
    kept = keep_short(found, tok, max_tokens=10)
    assert [p.id for p in kept.prompts] == ["a"]
    assert kept.dropped == {"longer than 10 tokens": 1}
    assert keep_short(found, tok, max_tokens=11) is found
    with pytest.raises(DataError, match=r"3 rows read, .*2 dropped: longer than 5 tokens, 0 kept"):
        keep_short(found, tok, max_tokens=5)

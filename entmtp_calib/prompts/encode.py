"""Messages to token ids: the one encoder of rollout, timing, training and decoding.

Acceptance measured on other ids than decoding uses is the acceptance of another model, so all go
through here. A chat template, the model's or one of `templates`, is rendered to text first and that
text tokenised without special tokens; then the tokenizer's own prefix (BOS) is put in front unless
the text has it already: so there is exactly one. Without a template the plain form is the messages'
text joined by blank lines. This module knows no task and no data file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entmtp_calib.config import PROMPT_MODES
from entmtp_calib.errors import DataError, ModelError, UsageError
from entmtp_calib.prompts.templates import TEMPLATES, template_of
from entmtp_calib.prompts.values import Messages, PromptSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE = "26 Jul 2024"
"""Some templates write today's date; with a fixed one, tomorrow's prompts are today's."""


def encode(tokenizer: PreTrainedTokenizerBase, messages: Messages, mode: str = "auto") -> list[int]:
    """Token ids of a prompt, ready for the model to answer.

    Args:
        messages: (role, content) pairs that end with the user's.
        mode: "chat" through the model's chat template, "raw" as plain text, the name of one of
            `TEMPLATES`, or "auto"; see `resolve_mode`.
    """
    resolved = resolve_mode(tokenizer, mode)
    if resolved == "raw":
        text = "\n\n".join(content for _, content in messages)
    else:
        text = _render(tokenizer, messages, TEMPLATES.get(resolved))
    ids = _with_prefix(tokenizer, text)
    if not ids:
        raise DataError("the prompt is empty (no tokens)", "some text")
    return ids


def resolve_mode(tokenizer: PreTrainedTokenizerBase, mode: str = "auto") -> str:
    """What `encode` will do: chat, raw or the name of a template; belongs in a run's record.

    "auto" is the model's chat template if it has one, else the template that models of its name
    were trained with, else raw.
    """
    if mode not in PROMPT_MODES:
        raise UsageError(f"prompt mode {mode}", f"one of {', '.join(PROMPT_MODES)}")
    has_template = bool(tokenizer.chat_template)
    if mode == "chat" and not has_template:
        raise ModelError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template",
            "one, for chat prompts",
            "use raw prompts, or one of the templates by name",
        )
    if mode == "auto":
        return "chat" if has_template else template_of(tokenizer.name_or_path or "") or "raw"
    return mode


def keep_short(
    prompts: PromptSet, tokenizer: PreTrainedTokenizerBase, max_tokens: int, mode: str = "auto"
) -> PromptSet:
    """The set without prompts of more than `max_tokens` tokens, which are counted as dropped."""
    short = [p for p in prompts.prompts if len(encode(tokenizer, p.messages, mode)) <= max_tokens]
    long = len(prompts.prompts) - len(short)
    if not long:
        return prompts
    dropped = Counter(prompts.dropped)
    dropped[f"longer than {max_tokens} tokens"] += long
    kept = replace(prompts, prompts=tuple(short), dropped=dict(dropped))
    if not short:
        raise DataError(
            f"{prompts.source} has no usable prompt: {kept.counts()}, 0 kept",
            f"prompts of at most {max_tokens} tokens",
            "pass shorter prompts, or a model with more positions",
        )
    return kept


def _with_prefix(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of `text` after what the tokenizer itself puts in front, once."""
    body: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    full: list[int] = tokenizer.encode(text, add_special_tokens=True, verbose=False)
    if not body:
        return body
    starts = range(len(full) - len(body) + 1)
    at = next((n for n in starts if full[n : n + len(body)] == body), 0)
    prefix = full[:at]
    return body if body[:at] == prefix else prefix + body


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, template: str | None) -> str:
    """The chat as text; a system message the template refuses or loses moves to the user's."""
    has_system = messages[0][0] == "system"
    try:
        text = _apply(tokenizer, messages, template)
    except ModelError:
        if not has_system:
            raise
        return _apply(tokenizer, _fold_system(messages), template)
    if has_system and messages[0][1].strip() not in text:
        return _apply(tokenizer, _fold_system(messages), template)
    return text


def _fold_system(messages: Sequence[tuple[str, str]]) -> Messages:
    (_, system), (role, first), *rest = messages
    return ((role, f"{system}\n\n{first}"), *rest)


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Messages, template: str | None) -> str:
    """Render with a template of ours, or with the model's where that is None."""
    from jinja2 import TemplateError

    chat = [{"role": role, "content": content} for role, content in messages]
    try:
        text: Any = tokenizer.apply_chat_template(
            chat,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            date_string=DATE,
        )
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        line = getattr(error, "lineno", None)
        raise ModelError(
            f"{_template_name(tokenizer)} fails{f' at line {line}' if line else ''}: {error}",
            "a chat template for user and assistant turns",
            "correct the template, or use raw prompts",
        ) from error
    return str(text)


def _template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """The file a template came from, as far as the tokenizer tells."""
    origin = tokenizer.name_or_path
    file = Path(origin) / "chat_template.jinja"
    return str(file) if origin and file.is_file() else f"the chat template of {origin or 'a model'}"

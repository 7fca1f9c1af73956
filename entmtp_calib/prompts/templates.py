"""Chat templates by name, for models that come without one of their own.

Each is what the model family was trained with, in the Jinja of transformers' templates: Vicuna v1.1
to v1.5 (FastChat's vicuna_v1.1), Stanford Alpaca, and ChatML. The tokenizer's own prefix (BOS) is
not part of them.
"""

from __future__ import annotations

import re
from pathlib import Path

_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)
_SPLIT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system, turns = messages[0]['content'], messages[1:] %}"
    "{% else %}{% set system, turns = DEFAULT, messages %}{% endif %}"
)

TEMPLATES = {
    "alpaca": _SPLIT_SYSTEM.replace("DEFAULT", repr(_ALPACA_SYSTEM))
    + "{{ system }}"
    + "{% for turn in turns %}"
    + "{% if turn['role'] == 'user' %}{{ '\n\n### Instruction:\n' + turn['content'] }}"
    + "{% else %}{{ '\n\n### Response:\n' + turn['content'] }}{% endif %}"
    + "{% endfor %}{{ '\n\n### Response:\n' }}",
    "chatml": "{% for turn in messages %}"
    + "{{ '<|im_start|>' + turn['role'] + '\n' + turn['content'] + '<|im_end|>\n' }}"
    + "{% endfor %}{{ '<|im_start|>assistant\n' }}",
    "vicuna": _SPLIT_SYSTEM.replace("DEFAULT", repr(_VICUNA_SYSTEM))
    + "{{ system + ' ' }}"
    + "{% for turn in turns %}"
    + "{% if turn['role'] == 'user' %}{{ 'USER: ' + turn['content'] + ' ' }}"
    + "{% else %}{{ 'ASSISTANT: ' + turn['content'] + (eos_token or '') }}{% endif %}"
    + "{% endfor %}{{ 'ASSISTANT:' }}",
}
_MODELS = {"vicuna": re.compile("vicuna", re.IGNORECASE)}


def template_of(origin: str) -> str | None:
    """The template that models of this name were trained with, if that is known.

    Args:
        origin: a hub id or a path: the name of a folder, or of a snapshot in the hub's cache.
    """
    parts = Path(origin).parts
    name = next((part for part in parts if part.startswith("models--")), parts[-1] if parts else "")
    return next((template for template, known in _MODELS.items() if known.search(name)), None)

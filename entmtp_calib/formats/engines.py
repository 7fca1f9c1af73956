"""The forms that other engines read: who reads each, and what it cannot express.

The one place where this is written down: help, notes and the README's table all come from here.
This module knows no trees and how no form is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from entmtp_calib.errors import UsageError


@dataclass(frozen=True)
class Form:
    """One form.

    Attributes:
        name: what `--format` takes.
        engine: who reads it.
        versions: which releases do.
        cannot: what of a bank it cannot express.
        drafts_with: what the engine drafts with.
        kinds: kinds of our heads for which that is the same.
        whole_bank: whether it is made from all trees of a bank; else from one.
    """

    name: str
    engine: str
    versions: str
    cannot: str
    drafts_with: str
    kinds: tuple[str, ...] = ()
    whole_bank: bool = False


FORMS = {
    form.name: form
    for form in (
        Form(
            "medusa",
            "Medusa and Hydra",
            "all",
            "child ranks above 9; more than one tree",
            "Medusa or Hydra heads",
            ("medusa", "hydra"),
        ),
        Form(
            "trtllm",
            "TensorRT-LLM, run.py and summarize.py",
            "those with TensorRT engines, 0.11 among them",
            "more than one tree",
            "Medusa heads",
            ("medusa",),
        ),
        Form(
            "trtllm-bench",
            "TensorRT-LLM, trtllm-bench latency",
            "those with TensorRT engines, 0.17 among them; not 1.3.0rc26",
            "more than one tree",
            "Medusa heads",
            ("medusa",),
        ),
        Form(
            "vllm-tree",
            "vLLM",
            "2025 to May 2026: from PR 20401 until PR 42121",
            "nodes of a level with unequal numbers of children; more than one tree",
            "EAGLE or MTP layers",
        ),
        Form(
            "vllm-schedule",
            "vLLM",
            "from PR 32374 (2026)",
            "branches: only chains, by batch size",
            "EAGLE or MTP layers",
            whole_bank=True,
        ),
        Form(
            "sglang",
            "SGLang",
            "all with EAGLE",
            "a shape: SGLang builds a tree each step from three numbers",
            "EAGLE or MTP layers",
        ),
        Form(
            "sglang-adaptive",
            "SGLang",
            "from PR 21599 (2026); the slots by batch size from PR 24055",
            "branches: only chains, by past acceptance",
            "EAGLE layers",
            whole_bank=True,
        ),
        Form(
            "eagle",
            "EAGLE",
            "EAGLE-1; EAGLE-2 and 3: three numbers, in a note",
            "child ranks above 9; more than one tree",
            "EAGLE layers",
        ),
        Form(
            "sequoia",
            "Sequoia",
            "all",
            "gaps between sibling ranks; more than one tree",
            "a draft model",
        ),
        Form(
            "modelopt",
            "NVIDIA Model Optimizer, Dynamo",
            "draft schema 1.0 (PR 2247)",
            "a tree: only its acceptance by depth",
            "any drafter",
            ("medusa", "hydra"),
        ),
    )
}


def form_named(name: str) -> Form:
    """The form of this name; `UsageError` where there is none."""
    if name not in FORMS:
        raise UsageError(f"--format {name}", f"one of {', '.join(FORMS)}")
    return FORMS[name]

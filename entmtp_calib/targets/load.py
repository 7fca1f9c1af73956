"""Load a target: from a folder, a Hugging Face id, a GGUF file, or the embedded default.

The place where name, files, device, engine and check come together; each is in a file of its own.
It does not know what heads, trees or prompts are.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch

from entmtp_calib.errors import ModelError
from entmtp_calib.provenance import usable_cores
from entmtp_calib.targets.default import NAME, default_folder
from entmtp_calib.targets.facts import facts_of
from entmtp_calib.targets.hf import TransformersEngine
from entmtp_calib.targets.lean import LeanEngine, is_worthwhile, why_not_lean
from entmtp_calib.targets.model import Engine, Target
from entmtp_calib.targets.network import (
    convert_gguf,
    first_line,
    load_network,
    load_tokenizer,
    quiet,
)
from entmtp_calib.targets.selfcheck import self_check

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_ENGINES = ("auto", "transformers", "lean")
_ATTENTION = ("auto", "eager", "sdpa")


def load_target(
    model: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "auto",
    attention: str = "auto",
    tokenizer: str | Path | None = None,
) -> Target:
    """A target that is proven to verify trees.

    Args:
        model: folder, .gguf file or Hugging Face id (id@revision too); None = the embedded default.
        device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1".
        dtype: "auto" (CUDA: the checkpoint's; CPU: float32, in the lean engine with weights packed
            to float16), or "float32", "float16", "bfloat16" for weights of exactly that type.
        engine: "auto" (lean for large enough Llama-like models on a CPU), "transformers", "lean".
        attention: "auto", "sdpa", "eager".
        tokenizer: folder or id of the tokenizer, where the model's own is missing or wrong.
    """
    _check_choice("engine", engine, _ENGINES)
    _check_choice("attention", attention, _ATTENTION)
    _check_choice("dtype", dtype, ("auto", *_DTYPES))
    limit_threads()
    where = resolve_device(device)
    weights_dtype = _DTYPES.get(dtype, "auto" if where.type == "cuda" else torch.float32)
    name, path = _locate(model)
    network = load_network(path, weights_dtype, None if attention == "auto" else attention)
    words = load_tokenizer(path if tokenizer is None else _locate(tokenizer)[1])
    network = network.to(where)
    chosen = _build_engine(network, engine, exact_weights=dtype != "auto")
    facts = facts_of(name, network, words)
    if chosen.name == "lean":
        facts = dataclasses.replace(facts, attention="lean")
    return Target(chosen, words, facts)


def limit_threads() -> None:
    """Never more torch threads than the process may use; a smaller OMP_NUM_THREADS stands."""
    cores = usable_cores()
    if torch.get_num_threads() > cores:
        torch.set_num_threads(cores)


def resolve_device(device: str) -> torch.device:
    """A device that exists here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ModelError(f"device '{device}'", "auto, cpu, cuda or cuda:N", "change --device")
    wanted = torch.device(device)
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device '{device}' is not available ({torch.cuda.device_count()} CUDA devices)",
            action="use --device cpu, or install a CUDA build of torch and check the driver",
        )
    return wanted


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ModelError(f"{what} '{value}'", " or ".join(choices), f"change --{what}")


def _build_engine(network: Any, wanted: str, exact_weights: bool) -> Engine:
    """The engine asked for, or the fastest that fits, once it has passed the self-check."""
    obstacle = why_not_lean(network) if wanted != "transformers" else "not wanted"
    if wanted == "lean" and obstacle:
        raise ModelError(f"the lean engine cannot run this model: {obstacle}", action="use auto")
    fits = obstacle is None and not exact_weights and is_worthwhile(network)
    is_lean = wanted == "lean" or fits
    chosen: Engine = LeanEngine(network) if is_lean else TransformersEngine(network)
    self_check(chosen, network)
    return chosen


def _locate(model: str | Path | None) -> tuple[str, Path]:
    """Name and local path of a model; hub files are fetched."""
    if model is None:
        return NAME, default_folder(convert_gguf)
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name, path
    if path.suffix == ".gguf":
        return path.stem, path
    if isinstance(model, str) and _HUB_ID.fullmatch(model) and not path.exists():
        return model, _fetch(model)
    raise ModelError(
        f"model '{model}' was not found",
        "a folder with config.json, a .gguf file, or a Hugging Face id",
        "check --model",
    )


def _fetch(model: str) -> Path:
    """Local snapshot of a hub model: configuration, tokenizer and safetensors only."""
    from huggingface_hub import snapshot_download

    repo, _, revision = model.partition("@")
    try:
        with quiet():
            folder = snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=_HUB_FILES,
                ignore_patterns=["*/*", "consolidated*"],
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"model '{model}' is no local folder and cannot be fetched ({first_line(error)})",
            action="check --model, the network, and `hf auth login` for gated models",
        ) from error
    return Path(folder)

"""Load a target: from a folder, a Hugging Face id, a GGUF file, the embedded default, or a model.

The place where name, files, device, engine and check come together; each is in a file of its own.
It does not know what heads, trees or prompts are.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from entmtp_calib.errors import EntmtpWarning, ModelError
from entmtp_calib.provenance import usable_cores
from entmtp_calib.targets.default import NAME, default_folder
from entmtp_calib.targets.facts import facts_of
from entmtp_calib.targets.families import check_verifies
from entmtp_calib.targets.fetch import fetch, is_hub_id
from entmtp_calib.targets.graphed import GraphedEngine, why_not_graphed
from entmtp_calib.targets.graphs import CudaGraphs
from entmtp_calib.targets.hf import TransformersEngine
from entmtp_calib.targets.lean import LeanEngine, is_worthwhile, why_not_lean
from entmtp_calib.targets.model import Engine, Target
from entmtp_calib.targets.network import (
    convert_gguf,
    load_network,
    load_tokenizer,
    network_config,
    verifiable_config,
)
from entmtp_calib.targets.selfcheck import honours_window, self_check

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_ENGINES: dict[str, Callable[[Any], Engine]] = {
    "graphed": lambda network: GraphedEngine(network, CudaGraphs(network.device)),
    "lean": LeanEngine,
    "transformers": TransformersEngine,
}
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
        engine: "auto" (graphed on CUDA, lean for large enough Llama-like models on a CPU),
            "graphed", "lean" or "transformers".
        attention: "auto", "sdpa", "eager".
        tokenizer: folder or id of the tokenizer, where the model's own is missing or wrong.
    """
    _check_choice("engine", engine, ("auto", *_ENGINES))
    _check_choice("attention", attention, _ATTENTION)
    _check_choice("dtype", dtype, ("auto", *_DTYPES))
    limit_threads()
    where = resolve_device(device)
    weights_dtype = _DTYPES.get(dtype, "auto" if where.type == "cuda" else torch.float32)
    name, path = _locate(model)
    network = load_network(path, weights_dtype, None if attention == "auto" else attention)
    words = load_tokenizer(path if tokenizer is None else _locate(tokenizer)[1])
    return _target(name, network.to(where), words, engine, exact_weights=dtype != "auto")


def wrap_model(model: Any, tokenizer: Any, *, engine: str = "auto") -> Target:
    """A target around a transformers model that is loaded already; its weights stay its own.

    Args:
        model: a causal language model in evaluation mode, whole on one device, with eager or sdpa
            attention; raises `ModelError` for others. Weights changed later are not noticed.
        tokenizer: the model's, as transformers loads it.
        engine: "auto" (graphed on CUDA, transformers elsewhere), "graphed", "lean" (a copy with
            weights packed to float16) or "transformers".
    """
    _check_choice("engine", engine, ("auto", *_ENGINES))
    check_verifies(model)
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ModelError(
            f"a model on {', '.join(devices)}", "one device", "load it without device_map"
        )
    if model.training:
        raise ModelError("a model in training mode", "evaluation mode", "call model.eval()")
    named = str(model.name_or_path) or str(model.config.model_type)
    name = Path(named).resolve().name if Path(named).is_dir() else named
    return _target(name, model, tokenizer, engine, exact_weights=True)


def load_config(model: str | Path) -> tuple[str, Any]:
    """Name and transformers configuration of a model; its weights are neither fetched nor read."""
    name, path = _locate(model, lambda repo: fetch(repo, ["config.json"], "model", ModelError))
    return name, network_config(path)


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


def _target(name: str, network: Any, tokenizer: Any, engine: str, exact_weights: bool) -> Target:
    """The target of a transformers model, once its engine is proven."""
    chosen = _build_engine(network, engine, exact_weights)
    windows = chosen.window is not None and honours_window(_ENGINES[chosen.name], network)
    facts = facts_of(name, network, tokenizer, windows)
    if chosen.name == "lean":
        facts = dataclasses.replace(facts, attention="lean")
    return Target(chosen, tokenizer, facts)


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ModelError(f"{what} '{value}'", " or ".join(choices), f"change --{what}")


def _build_engine(network: Any, wanted: str, exact_weights: bool) -> Engine:
    """The engine asked for, or the fastest that fits, once it has passed the self-check."""
    check = {"lean": why_not_lean, "graphed": why_not_graphed}.get(wanted)
    if check and (obstacle := check(network)):
        raise ModelError(
            f"the {wanted} engine cannot run this model: {obstacle}", action="use auto"
        )
    name = _fastest(network, exact_weights) if wanted == "auto" else wanted
    chosen = _ENGINES[name](network)
    try:
        self_check(chosen, network)
    except ModelError as error:
        if wanted != "auto" or name != "graphed":
            raise
        warnings.warn(
            EntmtpWarning(f"the engine transformers runs this model, slower ({error.found})"),
            stacklevel=2,
        )
        chosen = TransformersEngine(network)
        self_check(chosen, network)
    return chosen


def _fastest(network: Any, exact_weights: bool) -> str:
    """The name of the fastest engine that fits the model and where it is."""
    if why_not_graphed(network) is None:
        return "graphed"
    is_lean = not exact_weights and why_not_lean(network) is None and is_worthwhile(network)
    return "lean" if is_lean else "transformers"


def _locate(
    model: str | Path | None, fetched: Callable[[str], Path] | None = None
) -> tuple[str, Path]:
    """Name and local path of a model; the files of a hub id are `fetched`, by default all."""
    if model is None:
        return NAME, default_folder(convert_gguf)
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name, path
    if path.suffix == ".gguf":
        return path.stem, path
    if isinstance(model, str) and is_hub_id(model):
        return model, (fetched or _fetch)(model)
    raise ModelError(
        f"model '{model}' was not found",
        "a folder with config.json, a .gguf file, or a Hugging Face id",
        "check --model",
    )


def _fetch(model: str) -> Path:
    """Local snapshot of a hub model; pickled weights only where there are no others.

    Nothing but the configuration is fetched of a family that cannot verify trees.
    """
    verifiable_config(fetch(model, ["config.json"], "model", ModelError))
    folder = fetch(model, _HUB_FILES, "model", ModelError)
    if not any(folder.glob("*.safetensors")):
        folder = fetch(model, [*_HUB_FILES, "pytorch_model*.bin"], "model", ModelError)
    return folder

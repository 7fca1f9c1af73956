"""From a local path to transformers' model and tokenizer, whole and dense, or one clear line.

Files are checked before they are loaded; after loading, no weight may be newly initialised. Remote
code is never run, and pickled weights are read by torch's restricted unpickler, which makes tensors
and nothing else. It does not know hubs, devices or engines.
"""

from __future__ import annotations

import contextlib
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from entmtp_calib.errors import ModelError
from entmtp_calib.targets import checkpoint
from entmtp_calib.targets.families import check_family, check_verifies

LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


def load_network(path: Path, dtype: torch.dtype | str, attention: str | None) -> Any:
    """The causal language model of a folder or .gguf file, in evaluation mode, frozen, on the CPU.

    Args:
        path: a model folder or a .gguf file.
        dtype: of the weights, or "auto" for the checkpoint's.
        attention: "eager", "sdpa", or None for what the family supports.
    """
    is_gguf = path.suffix == ".gguf"
    if is_gguf:
        checkpoint.check_gguf(path)
    config = verifiable_config(path)
    if not is_gguf:
        checkpoint.check_folder(path)
    with quiet(), _without_stray_file(path) as source, _one_line(path):
        network, info = AutoModelForCausalLM.from_pretrained(
            **_source(source),
            dtype=dtype,
            attn_implementation=attention or _attention_for(config),
            use_safetensors=None if is_gguf else not checkpoint.is_pickled(path),
            weights_only=True,
            output_loading_info=True,
        )
    _check_loaded(path, network, info)
    check_verifies(network)
    if is_gguf:
        _forget_quantization(network)
    return network.eval().requires_grad_(False)


def network_config(path: Path) -> Any:
    """The transformers configuration of a model folder or .gguf file."""
    if path.suffix != ".gguf":
        checkpoint.check_config(path)
    with quiet(), _one_line(path):
        return AutoConfig.from_pretrained(**_source(path))


def verifiable_config(path: Path) -> Any:
    """The same of a model whose family can verify trees; raises `ModelError` for others."""
    config = network_config(path)
    with _one_line(path):
        check_family(config)
    return config


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in a folder or a .gguf file."""
    if path.suffix != ".gguf":
        checkpoint.check_tokenizer(path)
    with quiet(), _one_line(path, "the tokenizer of "):
        tokenizer = AutoTokenizer.from_pretrained(**_source(path))
        if path.suffix == ".gguf":
            _name_ends(tokenizer, AutoConfig.from_pretrained(**_source(path)))
    return tokenizer


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer as an ordinary safetensors folder."""
    network = load_network(gguf, torch.float32, None)
    with quiet():
        network.save_pretrained(folder)
        load_tokenizer(gguf).save_pretrained(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: what matters in them is checked here."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """The first line of an error of a library, or its type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def _name_ends(tokenizer: Any, config: Any) -> None:
    """Take BOS and EOS from the GGUF file itself: some transformers releases swap the two."""
    for role in ("bos_token", "eos_token"):
        index = getattr(config, f"{role}_id", None)
        if isinstance(index, int):
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(index))


def _source(path: Path) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a path."""
    arguments = {"trust_remote_code": False, "local_files_only": True}
    if path.suffix == ".gguf":
        return {
            "pretrained_model_name_or_path": str(path.parent),
            "gguf_file": path.name,
            **arguments,
        }
    return {"pretrained_model_name_or_path": str(path), **arguments}


@contextlib.contextmanager
def _one_line(path: Path, what: str = "") -> Iterator[None]:
    """Turn what the libraries raise about bad files into one line."""
    try:
        yield
    except LIBRARY_ERRORS as error:
        raise ModelError(
            f"{what}{path} cannot be loaded ({first_line(error)})",
            action=_advice(error, bool(what)),
        ) from error


def _advice(error: Exception, about_tokenizer: bool) -> str:
    text = str(error)
    if "trust_remote_code" in text or "custom code" in text:
        return "code that comes with a model is never run; use a family that transformers knows"
    if isinstance(error, pickle.UnpicklingError):
        return "weights may hold tensors alone; use a checkpoint in safetensors"
    if about_tokenizer:
        return "copy the tokenizer's files there, or name another tokenizer"
    if "scaled_dot_product" in text or "sdpa" in text:
        return "use attention eager"
    return "download or copy the model again, or use a family that this transformers knows"


def _check_loaded(path: Path, network: Any, info: dict[str, Any]) -> None:
    """No weight may be newly initialised, and none may have another shape."""
    tied = getattr(network, "_tied_weights_keys", None) or ()
    is_tied = getattr(network.config.get_text_config(), "tie_word_embeddings", False)
    allowed = set(tied) if is_tied else set()
    missing = sorted(set(info.get("missing_keys", ())) - allowed)
    mismatched = sorted(str(key) for key in info.get("mismatched_keys", ()))
    if missing or mismatched:
        raise ModelError(
            f"{path} lacks {len(missing)} weights and has {len(mismatched)} of another shape,"
            f" such as {(missing + mismatched)[0]}",
            f"all weights of {type(network).__name__}",
            "download or copy the model again",
        )


def _forget_quantization(network: Any) -> None:
    """After a GGUF load the weights are dense; drop what still says otherwise."""
    if not all(weight.is_floating_point() for weight in network.parameters()):
        raise ModelError("the GGUF file was not loaded as dense weights", action="use safetensors")
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.is_quantized = False
    network.hf_quantizer = None


def _attention_for(config: Any) -> str | None:
    """Soft-capped attention has no sdpa form; otherwise transformers' own choice."""
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if softcap is not None else None


@contextlib.contextmanager
def _without_stray_file(path: Path) -> Iterator[Path]:
    """The path, or a view of it without a model.safetensors that its index does not mention."""
    if path.suffix == ".gguf" or not checkpoint.stray_single_file(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as view:
        for file in path.iterdir():
            if file.name != "model.safetensors":
                (Path(view) / file.name).symlink_to(file.resolve())
        yield Path(view)

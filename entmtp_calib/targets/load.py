"""Load a target: from a folder, a Hugging Face id, a GGUF file, or the embedded default.

Everything that can be wrong with a model is found here and told in one line: files, family,
attention, device, position limits. Remote code is never run and pickles are never read. It does not
know what heads, trees or prompts are.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from entmtp_calib.errors import ModelError
from entmtp_calib.targets import checkpoint
from entmtp_calib.targets.cores import usable_cores
from entmtp_calib.targets.default import NAME, default_folder
from entmtp_calib.targets.fingerprint import fingerprint
from entmtp_calib.targets.hf import TransformersEngine
from entmtp_calib.targets.lean import LeanEngine, is_worthwhile, why_not_lean
from entmtp_calib.targets.model import Engine, Target, TargetFacts
from entmtp_calib.targets.selfcheck import self_check

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?|[\w.-]+(@[\w./-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_LIBRARY_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError, TypeError)
# Their rotary frequencies depend on the longest position of a pass, so a tree would change them.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_target(
    model: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "auto",
    attention: str = "auto",
    tokenizer: str | Path | None = None,
) -> Target:
    """A target ready to verify trees.

    Args:
        model: folder, .gguf file or Hugging Face id (id@revision too); None = the embedded default.
        device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1".
        dtype: "auto" (CPU: float32, CUDA: the checkpoint's), "float32", "float16", "bfloat16".
        engine: "auto", "transformers", "lean".
        attention: "auto", "sdpa", "eager".
        tokenizer: folder or id of the tokenizer, where the model's own is missing or wrong.
    """
    limit_threads()
    where = resolve_device(device)
    name, path = _locate(model)
    with _quiet():
        network = _load_network(path, _resolve_dtype(dtype, where), _resolve_attention(attention))
        words = _load_tokenizer(_locate(tokenizer)[1] if tokenizer is not None else path)
    network = network.to(where).eval()
    facts = _facts(name, network, words)
    return Target(_engine(engine, dtype, network), words, facts)


def limit_threads() -> None:
    """Never more torch threads than the process may use; a smaller OMP_NUM_THREADS stands."""
    cores = usable_cores()
    if torch.get_num_threads() > cores:
        torch.set_num_threads(cores)


def resolve_device(device: str) -> torch.device:
    """A device that exists here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = torch.device("meta")
    if wanted.type not in ("cpu", "cuda"):
        raise ModelError(f"device '{device}'", "auto, cpu, cuda or cuda:N", "change --device")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device '{device}' is not available ({torch.cuda.device_count()} CUDA devices)",
            action="use --device cpu, or install a CUDA build of torch and check the driver",
        )
    return wanted


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer as an ordinary safetensors folder."""
    with _quiet():
        network = _load_network(gguf, torch.float32, None)
        network.save_pretrained(folder)
        _load_tokenizer(gguf).save_pretrained(folder)


def _engine(engine: str, dtype: str, network: Any) -> Engine:
    if engine not in ("auto", "transformers", "lean"):
        raise ModelError(f"engine '{engine}'", "auto, transformers or lean")
    chosen: Engine = TransformersEngine(network)
    self_check(chosen, network)
    obstacle = why_not_lean(network)
    if engine == "lean" and obstacle:
        raise ModelError(f"the lean engine cannot run this model: {obstacle}", action="--engine auto")
    if engine == "lean" or (
        engine == "auto" and dtype == "auto" and not obstacle and is_worthwhile(network)
    ):
        chosen = LeanEngine(network)
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
        checkpoint.check_gguf(path)
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
        with _quiet():
            folder = snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=_HUB_FILES,
                ignore_patterns=["*/*", "consolidated*"],
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"model '{model}' is no local folder and cannot be fetched ({_first_line(error)})",
            action="check --model, the network, and `hf auth login` for gated models",
        ) from None
    return Path(folder)


def _load_network(path: Path, dtype: torch.dtype | str, attention: str | None) -> Any:
    """The transformers model at a checked local path."""
    is_gguf = path.suffix == ".gguf"
    if not is_gguf:
        checkpoint.check_folder(path)
    with _without_stray_file(path) as folder:
        source = str(folder.parent if is_gguf else folder)
        extra: dict[str, Any] = {"gguf_file": path.name} if is_gguf else {}
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False, **extra)
            _check_family(config)
            network, info = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation=attention or _attention_for(config),
                use_safetensors=None if is_gguf else True,
                trust_remote_code=False,
                output_loading_info=True,
                **extra,
            )
        except _LIBRARY_ERRORS as error:
            raise ModelError(f"{path} cannot be loaded ({_first_line(error)})", action=_advice(error)) from error
    _check_loaded(path, network, info)
    if is_gguf:
        _forget_quantization(network)
    return network


def _load_tokenizer(path: Path) -> Any:
    is_gguf = path.suffix == ".gguf"
    try:
        return AutoTokenizer.from_pretrained(
            str(path.parent if is_gguf else path),
            trust_remote_code=False,
            **({"gguf_file": path.name} if is_gguf else {}),
        )
    except _LIBRARY_ERRORS as error:
        raise ModelError(
            f"the tokenizer of {path} cannot be loaded ({_first_line(error)})",
            "tokenizer.json or the files of a known tokenizer class",
            "copy the tokenizer's files there, or pass --tokenizer",
        ) from error


def _check_family(config: Any) -> None:
    """Refuse by configuration what cannot take a row back or has no causal decoder."""
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or [])
    attending = {"full_attention", "sliding_attention", "chunked_attention"}
    if getattr(config, "is_encoder_decoder", False) or layers - attending:
        raise ModelError(
            f"model family '{config.model_type}' cannot verify trees"
            f" ({'encoder-decoder' if not layers else 'layers: ' + ', '.join(sorted(layers))})",
            "a decoder with attention in every layer",
            "use another target model",
        )


def _check_loaded(path: Path, network: Any, info: dict[str, Any]) -> None:
    """No weight may be newly initialised, and none of another shape."""
    tied = set(getattr(network, "_tied_weights_keys", None) or ())
    missing = sorted(set(info.get("missing_keys", ())) - tied)
    mismatched = sorted(str(key) for key in info.get("mismatched_keys", ()))
    if missing or mismatched:
        raise ModelError(
            f"{path} lacks {len(missing)} weights and has {len(mismatched)} of another shape,"
            f" such as {(missing + mismatched)[0]}",
            f"all weights of {type(network).__name__}",
            "download or copy the model again",
        )
    if getattr(network, "_is_stateful", False):
        raise ModelError(
            f"model family '{network.config.model_type}' is recurrent and cannot take rows back",
            "a decoder with attention in every layer",
            "use another target model",
        )
    implementation = network.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise ModelError(f"attention '{implementation}'", "eager or sdpa", "change --attention")


def _forget_quantization(network: Any) -> None:
    """After a GGUF load the weights are dense; drop what still says otherwise."""
    dense = all(type(m) is not torch.nn.Linear or m.weight.is_floating_point() for m in network.modules())
    if not dense:
        raise ModelError("the GGUF file was not loaded as dense weights", action="pass safetensors")
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.is_quantized = False
    network.hf_quantizer = None


def _facts(name: str, network: Any, tokenizer: Any) -> TargetFacts:
    weights = (item for item in network.named_parameters())
    return TargetFacts(
        name=name,
        family=network.config.model_type,
        fingerprint=fingerprint(network.config, tokenizer, weights),
        eos_ids=_eos_ids(network, tokenizer),
        max_positions=_max_positions(network.config.get_text_config()),
        attention=network.config._attn_implementation,
    )


def _eos_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    """Union of every id that configuration, generation configuration or tokenizer calls EOS."""
    generation = getattr(network, "generation_config", None)
    named = [
        getattr(network.config.get_text_config(), "eos_token_id", None),
        getattr(generation, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    lists = (value if isinstance(value, list | tuple) else [value] for value in named)
    return frozenset(int(value) for values in lists for value in values if value is not None)


def _max_positions(text: Any) -> int:
    """Positions that every layer sees entirely, with the same rotary frequencies throughout."""
    rope = getattr(text, "rope_parameters", None) or {}
    limits = [
        getattr(text, "max_position_embeddings", None),
        _window(text),
        getattr(text, "attention_chunk_size", None),
    ]
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        limits.append(rope.get("original_max_position_embeddings"))
        limits.append(getattr(text, "original_max_position_embeddings", None))
    known = [int(limit) for limit in limits if limit]
    if not known:
        raise ModelError(
            f"model family '{text.model_type}' states no max_position_embeddings",
            action="add it to config.json",
        )
    return min(known)


def _window(text: Any) -> int | None:
    """The sliding window, where the configuration uses one."""
    if getattr(text, "use_sliding_window", True) is False:
        return None
    layers = getattr(text, "layer_types", None)
    if layers and "sliding_attention" not in layers:
        return None
    return getattr(text, "sliding_window", None)


def _resolve_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return "auto" if device.type == "cuda" else torch.float32
    if dtype not in _DTYPES:
        raise ModelError(f"dtype '{dtype}'", "auto, float32, float16 or bfloat16", "change --dtype")
    return _DTYPES[dtype]


def _resolve_attention(attention: str) -> str | None:
    if attention not in ("auto", "eager", "sdpa"):
        raise ModelError(
            f"attention '{attention}' cannot take a tree mask", "eager or sdpa", "change --attention"
        )
    return None if attention == "auto" else attention


def _attention_for(config: Any) -> str | None:
    """Soft-capped attention has no sdpa form; otherwise transformers' own choice."""
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if softcap is not None else None


@contextlib.contextmanager
def _without_stray_file(path: Path) -> Iterator[Path]:
    """The folder, or a view of it without a model.safetensors that its index does not mention."""
    if path.suffix == ".gguf" or not checkpoint.stray_single_file(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as view:
        for file in path.iterdir():
            if file.name != "model.safetensors":
                (Path(view) / file.name).symlink_to(file.resolve())
        yield Path(view)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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


def _advice(error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text or "custom code" in text:
        return "models that bring their own code are not supported; use one that transformers knows"
    if "not supported by sdpa" in text or "scaled_dot_product" in text:
        return "pass --attention eager"
    return "check --model; the download may be incomplete or the family unknown to this transformers"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

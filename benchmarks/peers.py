"""Peers with weights of two bytes: llama.cpp, and transformers quantized to float16 by torch.

llama.cpp reads an F16 GGUF file, written here from a target's own weights: matrices as float16,
which is what the lean engine packs them to, so both compute with the same numbers. Only token ids
go in and out: the file's vocabulary is the ids written out (id 17 is the word " 17"), so any
tokenizer will do. This module knows no bank and no tree, and times nothing; what it makes of the
times of methods stands at its end. `xllamacpp` is imported when a server starts.
"""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn

from entmtp_calib.errors import ModelError
from entmtp_calib.files import TEMPORARY, writing
from entmtp_calib.stages.bench_figures import PLAIN, Runs, Written
from entmtp_calib.stages.bench_methods import Method
from entmtp_calib.stages.peers import Peers
from entmtp_calib.targets.model import Target
from entmtp_calib.timing import mean_interval, paired_bootstrap

_LLAMA, _QWEN2, _QWEN3 = (getattr(gguf.MODEL_ARCH, name) for name in ("LLAMA", "QWEN2", "QWEN3"))
ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
}
"""Class in transformers -> llama.cpp's architecture."""
TRANSFORMERS, HALF, LLAMA = "transformers", "transformers-fp16", "llama.cpp"
BASELINES = {"x_llama_cpp": LLAMA, "x_transformers": TRANSFORMERS}
"""Column -> the method whose time per token stands below the line."""

Texts = dict[tuple[int, ...], list[int]]
"""Prompt -> what a method wrote after it."""


def installed() -> str | None:
    """The version of xllamacpp, or None: then llama.cpp takes no part."""
    try:
        return importlib.metadata.version("xllamacpp")
    except importlib.metadata.PackageNotFoundError:
        return None


def cached_gguf(target: Target, network: Callable[[], Any], folder: Path) -> Path:
    """The F16 file of a target in a folder, written there unless an earlier one is found.

    Args:
        target: names the file by its fingerprint; its EOS is the file's.
        network: gives the transformers model with the weights; called only to write.
        folder: made if need be.

    Raises:
        ModelError: a family or a rotary embedding that this writer does not know.
        ArtifactError: the file cannot be written.
    """
    path = folder / f"{Path(target.name).name}-{target.fingerprint[:12]}-f16.gguf"
    if not path.exists():
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            write_gguf(network(), path, eos=min(target.eos_ids, default=None))
    return path


def write_gguf(network: Any, path: Path, eos: int | None = None) -> None:
    """Write a transformers model as F16 GGUF, whole or not at all; norms and biases stay float32.

    Args:
        network: of a family in `ARCHITECTURES` with the usual rotary embedding.
        eos: the token that llama.cpp shall take for the end of a text.
    """
    config = network.config
    arch = ARCHITECTURES.get(type(network).__name__)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if arch is None or rope != "default":
        raise ModelError(
            f"{type(network).__name__} with rotary embedding {rope}",
            f"{', '.join(ARCHITECTURES)} with the default one, to write GGUF",
        )
    temporary = path.with_name(f"{TEMPORARY}-{os.getpid()}-{path.name}")
    try:
        with closing(gguf.GGUFWriter(temporary, gguf.MODEL_ARCH_NAMES[arch])) as writer:
            _add_facts(writer, config)
            _add_vocabulary(writer, config.vocab_size, eos)
            for name, tensor in tensors(network, arch).items():
                writer.add_tensor(name, tensor.numpy())
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def tensors(network: Any, arch: Any) -> dict[str, Tensor]:
    """Name in GGUF -> the tensor as the file holds it; an output layer that is tied stands once."""
    config = network.config
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, parameter in network.named_parameters():
        weight = parameter.detach().float().cpu()
        projection = name.split(".")[-2]
        if arch == _LLAMA and projection in heads:
            weight = paired(weight, heads[projection])
        matrix = weight.dim() > 1
        found[names.get_name(name, (".weight", ".bias"))] = weight.half() if matrix else weight
    return found


def paired(rows: Tensor, heads: int) -> Tensor:
    """Rows of a projection in the order of GGUF's llama.

    Transformers turns row i of a head with row i + head_dim / 2, llama.cpp each row with its
    neighbor (its type NORM; for the Qwens it does as transformers does).
    """
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _add_facts(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_vocabulary(writer: Any, size: int, eos: int | None) -> None:
    """The ids as words, in the one kind of vocabulary that needs no merges."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"\N{LOWER ONE EIGHTH BLOCK}{index}" for index in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    if eos is not None:
        writer.add_eos_token_id(eos)


class LlamaCpp:
    """Greedy decoding by llama.cpp, one text at a time; the model is loaded at first use.

    Args:
        file: gives the path of the GGUF file.
        context: most tokens of a prompt and its text together.
        threads: of every pass.
    """

    def __init__(self, file: Callable[[], Path], context: int, threads: int) -> None:
        self._file, self._context, self._threads = file, context, threads

    def generate(self, prompt_ids: Sequence[int], n_tokens: int) -> Written:
        """Exactly `n_tokens` tokens after a prompt; EOS is never written.

        The times are llama.cpp's own: of the prompt's pass, then from its token to the last one.
        """
        answer = self._server.handle_completions(
            {
                "prompt": list(prompt_ids),
                "n_predict": n_tokens,
                "temperature": 0,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        times = answer["timings"]
        return Written(
            tokens=[int(word) for word in answer["choices"][0]["text"].split()],
            steps=n_tokens,
            passes=n_tokens - 1,
            switches=None,
            prefill_seconds=times["prompt_ms"] / 1000,
            decode_seconds=times["predicted_ms"] / 1000,
        )

    @cached_property
    def _server(self) -> Any:
        import xllamacpp  # type: ignore[import-not-found, unused-ignore]

        settings = xllamacpp.CommonParams()
        settings.model.path = str(self._file())
        settings.n_ctx, settings.n_parallel = self._context, 1
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = self._threads
        settings.verbosity = -1  # errors only, which it raises as well
        return xllamacpp.Server(settings)


class HalfPeers(Peers):
    """transformers' own generation with its linear layers quantized to float16.

    Args:
        exact: the peers whose network is quantized.
        target, model: theirs.
    """

    def __init__(self, exact: Peers, target: Target, model: str | None) -> None:
        super().__init__(target, model)
        self._exact = exact

    @cached_property
    def network(self) -> Any:
        """A second network; the one it is made of stays as it is."""
        quantize = torch.ao.quantization.quantize_dynamic
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still what people use
            return quantize(self._exact.network, {nn.Linear}, dtype=torch.float16)


def recording(method: Method, texts: Texts) -> Method:
    """The same method, which leaves its latest text of each prompt in `texts`."""

    def generate(ids: Sequence[int], n_tokens: int) -> Written:
        written = method.generate(ids, n_tokens)
        texts[tuple(ids)] = list(written.tokens)
        return written

    return Method(method.name, generate, method.claims_lossless)


def method_row(
    name: str, lossless: bool, runs: Runs, texts: Mapping[str, Texts], ends: frozenset[int]
) -> dict[str, Any]:
    """The figures of a method, decoding only: the first token of a text is its prompt's pass.

    Args:
        name: the method's.
        lossless: whether it must write plain decoding's text, EOS and all.
        runs: of all methods that did not fail, prompts in one order.
        texts: per method.
        ends: ids of EOS.
    """
    seconds, tokens = _decoding(runs, name)
    ratios: dict[str, Any] = {}
    for column, baseline in BASELINES.items():
        theirs = _decoding(runs, baseline)
        # Tokens per second of the baseline over ours: our time per token over theirs.
        ratio = paired_bootstrap(theirs[1], theirs[0], tokens, seconds) if theirs[0] else None
        ratios[column] = ratio
    mine = [run for run in runs if run["method"] == name]
    common = in_common(texts[name], texts[PLAIN], ends)
    alike = [n == whole for n, whole in common]
    return {
        "method": name,
        "claims_lossless": lossless,
        "error": None,
        "ms_per_token": mean_interval([1000 * each for each in seconds], tokens),
        **ratios,
        "decode_seconds": sum(seconds),
        "tokens_after_the_first": sum(tokens),
        "passes": sum(run["passes"] for run in mine),
        "texts": len(mine),
        "texts_as_plain": sum(run["same"] for run in mine) if lossless else sum(alike),
        "tokens_in_common": sum(n for n, _ in common),
        "tokens_of_plain": sum(whole for _, whole in common),
    }


def in_common(mine: Texts, plain: Texts, ends: frozenset[int]) -> list[tuple[int, int]]:
    """Per prompt the tokens up to the first that is not plain's, and plain's; a last EOS left out.

    Not every peer is able to write an EOS.
    """
    pairs = []
    for ids, tokens in plain.items():
        tokens = tokens[:-1] if tokens[-1] in ends else tokens
        pair = zip(mine[ids], tokens, strict=False)
        unlike = (n for n, (one, other) in enumerate(pair) if one != other)
        pairs.append((next(unlike, min(len(mine[ids]), len(tokens))), len(tokens)))
    return pairs


def _decoding(runs: Runs, name: str) -> tuple[list[float], list[int]]:
    """Per prompt: seconds behind its pass, and tokens."""
    mine = [run for run in runs if run["method"] == name]
    return [run["decode_seconds"] for run in mine], [run["tokens"] - 1 for run in mine]

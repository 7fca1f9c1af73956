"""What every stage of a run works with: target, heads, prompts and the run folder.

A run's folder has a name made of its settings and inputs, so the same command finds its own earlier
work again and resumes it. This module knows the order of nothing: `build_bank` does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from entmtp_calib.artifacts import RUN, RunFolder
from entmtp_calib.config import DEFAULT_HEADS_NAME, BuildConfig
from entmtp_calib.errors import ArtifactError, DataError, UsageError
from entmtp_calib.heads.model import Heads
from entmtp_calib.heads.native import DESCRIPTION, heads_fingerprint, read_description
from entmtp_calib.heads.native import load_heads as load_native
from entmtp_calib.plan import check_tree
from entmtp_calib.progress import Progress, Silent
from entmtp_calib.prompts import (
    PromptSet,
    Splits,
    encode,
    keep_short,
    load_prompts,
    resolve_mode,
    split,
)
from entmtp_calib.provenance import sha256_json
from entmtp_calib.stages.import_heads import heads_folder
from entmtp_calib.stages.recorded import SPLITS
from entmtp_calib.stages.schedule import signals_to_try
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.tree import Tree

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_HEADS = ROOT / "artifacts" / "heads" / DEFAULT_HEADS_NAME
BANKS = Path("artifacts") / "banks"


@dataclass(frozen=True)
class Inputs:
    """What a run reads; None stands for the embedded default."""

    model: str | None = None
    heads: str | None = None
    data: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    engine: str = "auto"

    def located(self) -> Inputs:
        """The same with full paths where these are files, to be found from anywhere."""
        names = ("model", "heads", "data")
        found = {n: v for n in names if (v := getattr(self, n)) and Path(v).exists()}
        return replace(self, **{n: str(Path(v).resolve()) for n, v in found.items()})


@dataclass(frozen=True)
class Encoded:
    """A prompt as the target gets it."""

    id: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """An opened run; use its folder as a context manager so that the lock is given back."""

    config: BuildConfig
    inputs: Inputs
    target: Target
    heads: Heads
    heads_facts: dict[str, Any]
    data_facts: dict[str, Any]
    splits: dict[str, tuple[Encoded, ...]]
    trees: tuple[Tree, ...] | None
    """Given candidates; None where they are grown."""
    folder: RunFolder
    command: Sequence[str]
    progress: Progress
    load_seconds: float
    """What opening it took: model, heads and prompts."""

    @property
    def max_depth(self) -> int:
        """The depth trees may have: what was asked for, within what the heads draft."""
        return min(self.config.max_depth or self.heads.n_heads, self.heads.n_heads)

    @property
    def n_ranks(self) -> int:
        """The child ranks trees may use."""
        return min(self.config.max_rank, self.heads.n_ranks)

    @property
    def model_facts(self) -> dict[str, Any]:
        """See `model_facts`."""
        return model_facts(self.target)

    @property
    def text_inputs(self) -> dict[str, Any]:
        """All that the generated text and the heads' ranks depend on."""
        config = self.config
        return {
            "model": self.target.fingerprint,
            "dtype": str(self.target.dtype),
            # Engines and kinds of device round differently, which may decide a near-tie.
            "engine": self.target.engine,
            "device": self.target.device.type,
            "heads": self.heads_facts["fingerprint"],
            "architecture": self.heads.config.to_dict(),
            "prompts": {name: [p.ids for p in prompts] for name, prompts in self.splits.items()},
            "max_new_tokens": config.max_new_tokens,
            "sampling": config.sampling.to_dict(),
        }


def model_facts(target: Target) -> dict[str, Any]:
    """What a bank remembers of its target."""
    return {
        "name": target.name,
        "fingerprint": target.fingerprint,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "engine": target.engine,
        "device": str(target.device),
    }


def find_heads(heads: str | None, target: Target) -> tuple[str, Path]:
    """Name and native folder of heads: the user's, published ones imported, or the default's."""
    if heads is None:
        return DEFAULT_HEADS.name, DEFAULT_HEADS
    return heads_folder(heads, target)


def open_heads(heads: str | None, target: Target) -> tuple[Heads, dict[str, Any]]:
    """Heads for a target, with what a bank remembers of them; see `find_heads`."""
    name, folder = find_heads(heads, target)
    loaded = load_native(folder, target)
    facts = {"name": name, **heads_facts(loaded), "fingerprint": heads_fingerprint(folder)}
    return loaded, facts


def load_heads(heads: str | Path | None, target: Target) -> Heads:
    """Heads for a target: a folder or published ones by path or hub id; None = the default's."""
    return open_heads(None if heads is None else str(heads), target)[0]


def heads_facts(heads: Heads) -> dict[str, Any]:
    """What can be said of heads without their files."""
    return {
        "kind": heads.kind,
        "n_heads": heads.n_heads,
        "hidden_size": heads.config.hidden_size,
    }


def open_run(
    config: BuildConfig,
    inputs: Inputs,
    out: Path | None = None,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    trees: Sequence[Tree] | None = None,
) -> Run:
    """Load everything a run needs and lock its folder.

    Cheap checks come first: prompts before the model, so that a wrong file costs no minute.

    Args:
        trees: candidates that are measured instead of grown ones; the heads must draft them.
    """
    started, progress = perf_counter(), progress or Silent()
    signals_to_try(config.signal, _native_depth(inputs.heads))
    prompts = load_prompts(config.task, Path(inputs.data) if inputs.data else None)
    sizes = (config.search_prompts, config.select_prompts, config.report_prompts)
    _split(prompts, sizes, config.seed)
    target = load_target(
        inputs.model, device=inputs.device, dtype=inputs.dtype, engine=inputs.engine
    )
    heads, heads_facts = open_heads(inputs.heads, target)
    signals_to_try(config.signal, heads.n_heads)
    for tree in trees or ():
        check_tree(tree, heads)
    # Every tree must find its positions at every step, so that replay sees what decoding does.
    positions = target.max_positions - heads.n_heads
    room = min(config.max_prompt_tokens, positions - config.max_new_tokens)
    if room < 1:
        raise UsageError(
            f"--max-new-tokens {config.max_new_tokens}",
            f"less than {positions}, the positions of {target.name} less the depth of the heads",
        )
    kept = keep_short(prompts, target.tokenizer, room, config.prompt_mode)
    splits = _encoded_splits(kept, sizes, config, target)
    data_facts = _data_facts(kept, config, target)
    folder = out or _default_folder(config, target, heads_facts, data_facts)
    description = {
        "settings": config.to_dict(),
        "inputs": asdict(inputs.located()),
        "trees": None if trees is None else [tree.to_list() for tree in trees],
        "model": model_facts(target),
        "heads": heads_facts,
        "data": data_facts,
    }
    return Run(
        config=config,
        inputs=inputs,
        target=target,
        heads=heads,
        heads_facts=heads_facts,
        data_facts=data_facts,
        splits=splits,
        trees=None if trees is None else tuple(trees),
        folder=RunFolder.create(folder, description),
        command=command,
        progress=progress,
        load_seconds=perf_counter() - started,
    )


def reopen_run(path: Path, command: Sequence[str] = (), progress: Progress | None = None) -> Run:
    """Open an existing folder under the settings it was made with."""
    config, inputs = read_settings(path)
    given = RunFolder.open(path).config.get("trees")
    trees = None if given is None else [Tree.of(paths) for paths in given]
    return open_run(config, inputs, path, command, progress, trees)


def run_folder_of(bank_path: Path) -> Path | None:
    """The run folder that a bank lies in; None for a bank file that stands alone."""
    folder = bank_path if bank_path.is_dir() else bank_path.parent
    return folder if (folder / RUN).is_file() else None


def read_settings(path: Path) -> tuple[BuildConfig, Inputs]:
    """The settings and inputs in a run folder's `run.json`."""
    described = RunFolder.open(path).config
    try:
        return BuildConfig.from_dict(described["settings"]), Inputs(**described["inputs"])
    except (KeyError, TypeError, UsageError) as error:
        raise ArtifactError(
            f"{path}/run.json holds settings of another version ({error})",
            action="build the bank again in another folder",
        ) from error


def _native_depth(heads: str | None) -> int | None:
    """How many heads a native folder has, without loading any; None where that is not told."""
    folder = DEFAULT_HEADS if heads is None else Path(heads)
    if not (folder / DESCRIPTION).is_file():
        return None
    architecture = read_description(folder).get("architecture")
    return architecture.get("n_heads") if isinstance(architecture, dict) else None


def _split(prompts: PromptSet, sizes: tuple[int, int, int], seed: int) -> Splits:
    """The splits; where there are too few prompts, the error says what became of the others."""
    try:
        return split(prompts.prompts, sizes, seed)
    except DataError as error:
        found = f"{error.found} in {prompts.source} ({prompts.counts()})"
        raise DataError(found, error.expected, error.action) from None


def _encoded_splits(
    kept: PromptSet, sizes: tuple[int, int, int], config: BuildConfig, target: Target
) -> dict[str, tuple[Encoded, ...]]:
    parts = _split(kept, sizes, config.seed)
    return {
        name: tuple(
            Encoded(p.id, tuple(encode(target.tokenizer, p.messages, config.prompt_mode)))
            for p in getattr(parts, name)
        )
        for name in SPLITS
    }


def _data_facts(kept: PromptSet, config: BuildConfig, target: Target) -> dict[str, Any]:
    return {
        "source": kept.source,
        "sha256": kept.sha256,
        "description": kept.describe(),
        "prompt_mode": resolve_mode(target.tokenizer, config.prompt_mode),
    }


def _default_folder(
    config: BuildConfig, target: Target, heads: dict[str, Any], data: dict[str, Any]
) -> Path:
    """artifacts/banks/<model>/<task>/<hash of everything that was chosen>."""
    chosen = [config.to_dict(), target.fingerprint, str(target.dtype), str(target.device)]
    digest = sha256_json([*chosen, target.engine, heads["fingerprint"], data["sha256"]])
    model = re.sub(r"[^\w.-]+", "--", target.name)
    return BANKS / model / config.task / digest[:12]

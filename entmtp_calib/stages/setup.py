"""What every stage of a run works with: target, heads, prompts and the run folder.

A run's folder has a name made of its settings and inputs, so the same command finds its own earlier
work again and resumes it. This module knows the order of nothing: `build_bank` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from entmtp_calib.artifacts import RUN, RunFolder
from entmtp_calib.config import DEFAULT_HEADS_NAME, BuildConfig
from entmtp_calib.errors import ArtifactError, TreeError, UsageError
from entmtp_calib.heads.model import Heads
from entmtp_calib.heads.native import DESCRIPTION, heads_fingerprint, read_description
from entmtp_calib.heads.native import load_heads as load_native
from entmtp_calib.plan import check_tree
from entmtp_calib.progress import Progress, Silent
from entmtp_calib.prompts import keep_short, load_prompts
from entmtp_calib.provenance import sha256_json
from entmtp_calib.stages.import_heads import heads_folder
from entmtp_calib.stages.recorded import USER_TREES, user_trees_of
from entmtp_calib.stages.run_prompts import Encoded, data_facts, encoded_splits, split_prompts
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
    user_trees: Mapping[Tree, str]
    """Trees measured beside those, with what the user calls them."""
    folder: RunFolder
    command: Sequence[str]
    progress: Progress
    load_seconds: float
    """What opening it took: model, heads and prompts."""

    @property
    def ungrown(self) -> list[Tree]:
        """All trees that were not grown here: given candidates, then the user's own."""
        return list(dict.fromkeys([*(self.trees or ()), *self.user_trees]))

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
    user_trees: Mapping[Tree, str] | None = None,
) -> Run:
    """Load everything a run needs and lock its folder.

    Cheap checks come first: prompts before the model, so that a wrong file costs no minute.

    Args:
        trees: candidates that are measured instead of grown ones; the heads must draft them.
        user_trees: candidates that are measured beside either, with their names; likewise.
    """
    started, progress, user_trees = perf_counter(), progress or Silent(), user_trees or {}
    signals_to_try(config.signal, _native_depth(inputs.heads))
    prompts = load_prompts(config.task, Path(inputs.data) if inputs.data else None)
    split_prompts(prompts, config)
    target = load_target(
        inputs.model, device=inputs.device, dtype=inputs.dtype, engine=inputs.engine
    )
    heads, heads_facts = open_heads(inputs.heads, target)
    signals_to_try(config.signal, heads.n_heads)
    for tree in trees or ():
        check_tree(tree, heads)
    for tree, name in user_trees.items():
        _check_user_tree(tree, name, heads)
    # Every tree must find its positions at every step, so that replay sees what decoding does.
    positions = target.max_positions - heads.n_heads
    room = min(config.max_prompt_tokens, positions - config.max_new_tokens)
    if room < 1:
        raise UsageError(
            f"--max-new-tokens {config.max_new_tokens}",
            f"less than {positions}, the positions of {target.name} less the depth of the heads",
        )
    kept = keep_short(prompts, target.tokenizer, room, config.prompt_mode)
    splits = encoded_splits(kept, config, target)
    facts = data_facts(kept, config, target)
    folder = out or _default_folder(config, target, heads_facts, facts, user_trees)
    description: dict[str, Any] = {
        "settings": config.to_dict(),
        "inputs": asdict(inputs.located()),
        "trees": None if trees is None else [tree.to_list() for tree in trees],
        "model": model_facts(target),
        "heads": heads_facts,
        "data": facts,
    }
    if user_trees:
        named = [{"name": name, "paths": tree.to_list()} for tree, name in user_trees.items()]
        description[USER_TREES] = named
    return Run(
        config=config,
        inputs=inputs,
        target=target,
        heads=heads,
        heads_facts=heads_facts,
        data_facts=facts,
        splits=splits,
        trees=None if trees is None else tuple(trees),
        user_trees=user_trees,
        folder=RunFolder.create(folder, description),
        command=command,
        progress=progress,
        load_seconds=perf_counter() - started,
    )


def reopen_run(path: Path, command: Sequence[str] = (), progress: Progress | None = None) -> Run:
    """Open an existing folder under the settings it was made with."""
    config, inputs = read_settings(path)
    folder = RunFolder.open(path)
    given = folder.config.get("trees")
    trees = None if given is None else [Tree.of(paths) for paths in given]
    return open_run(config, inputs, path, command, progress, trees, user_trees_of(folder))


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


def native_folder(heads: str | None) -> Path | None:
    """The folder of native heads, the default's for None; None where they are published ones."""
    folder = DEFAULT_HEADS if heads is None else Path(heads)
    return folder if (folder / DESCRIPTION).is_file() else None


def _native_depth(heads: str | None) -> int | None:
    """How many heads a native folder has, without loading any; None where that is not told."""
    folder = native_folder(heads)
    architecture = read_description(folder).get("architecture") if folder else None
    return architecture.get("n_heads") if isinstance(architecture, dict) else None


def _check_user_tree(tree: Tree, name: str, heads: Heads) -> None:
    """Raise `TreeError` under the user's name for it unless the heads can draft the tree."""
    try:
        check_tree(tree, heads)
    except TreeError as error:
        raise TreeError(f"{name}: {error.found}", error.expected, error.action) from None


def _default_folder(
    config: BuildConfig,
    target: Target,
    heads: dict[str, Any],
    data: dict[str, Any],
    trees: Iterable[Tree],
) -> Path:
    """artifacts/banks/<model>/<task>/<hash of everything that was chosen>."""
    chosen = [config.to_dict(), target.fingerprint, str(target.dtype), str(target.device)]
    chosen += [target.engine, heads["fingerprint"], data["sha256"]]
    digest = sha256_json([*chosen, *sorted(tree.to_list() for tree in trees)])
    model = re.sub(r"[^\w.-]+", "--", target.name)
    return BANKS / model / config.task / digest[:12]

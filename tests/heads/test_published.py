"""Published heads compute what their definitions say, whatever their config.json says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import toys
from published_heads import (
    HYDRA_CONFIG,
    HYDRA_PT,
    HYDRA_SAFE,
    INNER,
    MEDUSA_CONFIG,
    MEDUSA_PT,
    MEDUSA_SAFE,
    State,
    hydra_state,
    imported,
    in_vllm_names,
    medusa_state,
    save_heads_file,
    save_medusa2,
)
from safetensors.torch import load_file
from slow_heads import hydra_logits, medusa_logits, prefix_vectors

from entmtp_calib.decoding import Decoder
from entmtp_calib.heads.model import Heads, HeadState
from entmtp_calib.heads.native import load_heads
from entmtp_calib.heads.prefix import PrefixConfig
from entmtp_calib.policy import Static
from entmtp_calib.stages.import_heads import import_heads
from entmtp_calib.stages.setup import open_heads
from entmtp_calib.targets.load import load_target
from entmtp_calib.tree import EMPTY, chain

TEXT, PATH = [2, 7, 1, 8, 2, 8, 1], [4, 9, 0, 5, 3]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of RAND, whose configuration some heads need."""
    return toys.save_rand(tmp_path_factory.mktemp("base") / "rand")


def drafts(heads: Heads) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The target's hidden states of TEXT, and each head's scores behind a path of drafts."""
    target = toys.rand()
    hidden = target.forward(TEXT, list(range(len(TEXT))), target.new_cache(len(TEXT)))
    state = HeadState()
    positions = torch.arange(len(TEXT))
    heads.observe(state, hidden[:4], positions[:4])
    heads.observe(state, hidden[4:], positions[4:])
    scores = [
        heads.level_logits(depth, state.vector, torch.tensor([PATH[:depth]]))[0]
        for depth in range(1, heads.n_heads + 1)
    ]
    return hidden, scores


def check_hydra(heads: Heads, state: State, atol: float = 2e-4) -> None:
    hidden, scores = drafts(heads)
    vector = hidden[-1]
    if "prefix_embeding_layer.norm.weight" in state:
        vector = prefix_vectors(state, hidden, 4, 2, theta=10000.0, eps=1e-6)[-1]
    embeddings = list(toys.rand().embedding_weight[PATH])
    for i, found in enumerate(scores):
        expected = hydra_logits(state, i, vector, embeddings[: i + 1])
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=atol / 2)


def check_medusa(heads: Heads, state: State) -> None:
    hidden, scores = drafts(heads)
    for i, found in enumerate(scores):
        expected = medusa_logits(state, i, hidden[-1], toys.rand().lm_head_weight)
        torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("file", [HYDRA_PT, HYDRA_SAFE])
@pytest.mark.parametrize(("arch", "n_layers"), [("prefix-mlp", 4), ("mlp", 2), ("mlp", 1)])
def test_hydra_heads_compute_their_definition(
    file: str, arch: str, n_layers: int, base: Path, tmp_path: Path
) -> None:
    state = hydra_state(arch, n_layers=n_layers)
    config = {**HYDRA_CONFIG, "hydra_head_arch": arch, "hydra_num_layers": n_layers}
    source = save_heads_file(tmp_path / "published", file, state, config)
    found, heads = imported(source, tmp_path / "out", base if arch == "prefix-mlp" else None)
    assert (found.layout, found.n_heads, found.n_layers) == (f"Hydra {arch}", 4, n_layers)
    assert (found.hidden_size, found.vocab_size) == (32, toys.RAND_VOCAB)
    assert (found.target, found.dtypes) == ("lmsys/vicuna-7b-v1.3", ["bfloat16"])
    assert (found.notes, "input_embed_fn.weight" in found.ignored) == ((), True)
    layer = PrefixConfig(INNER, 4, 2, head_dim=8, rope_theta=10000.0, rms_eps=1e-6)
    assert heads.config.prefix == (layer if arch == "prefix-mlp" else None)
    check_hydra(heads, state)
    check_hydra(load_heads(tmp_path / "out", toys.rand()), state, atol=0.05)  # packed, on a CPU


@pytest.mark.parametrize("file", [MEDUSA_PT, MEDUSA_SAFE])
@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize("biases", [True, False])
def test_medusa_v1_heads_compute_their_definition(
    file: str, n_layers: int, biases: bool, tmp_path: Path
) -> None:
    state = medusa_state(n_layers=n_layers, biases=biases)
    source = save_heads_file(tmp_path / "published", file, state, MEDUSA_CONFIG)
    found, heads = imported(source, tmp_path / "out", None)
    assert (found.layout, found.n_heads, found.n_layers) == ("Medusa V1", 5, n_layers)
    assert "config.json says medusa_num_heads 2, the tensors are 5" in found.notes
    assert any("biases were dropped" in note for note in found.notes) is not biases
    check_medusa(heads, state)


@pytest.mark.parametrize("biases", [True, False])
def test_heads_in_vllms_names_are_medusa_v1(biases: bool, tmp_path: Path) -> None:
    state = medusa_state(biases=biases)
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 5}
    source = save_heads_file(tmp_path / "v", "model.safetensors", in_vllm_names(state), config)
    found, heads = imported(source, tmp_path / "out", None)
    assert (found.layout, found.n_heads, found.target) == ("Medusa V1", 5, None)
    check_medusa(heads, state)


def test_medusa_v2_heads_share_the_targets_projection(base: Path, tmp_path: Path) -> None:
    state = medusa_state(3, own_projection=False)
    config = {**MEDUSA_CONFIG, "medusa_num_heads": 3, "version": "2"}
    source = save_heads_file(tmp_path / "published", MEDUSA_SAFE, state, config)
    found, heads = imported(source, tmp_path / "out", base)
    assert (found.layout, found.vocab_size, found.notes) == ("Medusa V2", toys.RAND_VOCAB, ())
    check_medusa(heads, state)


@pytest.mark.parametrize("pickled", [True, False])
def test_a_medusa_2_model_is_target_and_heads(pickled: bool, tmp_path: Path) -> None:
    state = medusa_state(dtype=torch.float16)
    source = save_medusa2(tmp_path / "medusa-2", state, pickled)
    target = load_target(source)
    alone = load_target(toys.save_rand(tmp_path / "alone", dtype=torch.float16))
    assert target.fingerprint == alone.fingerprint
    found, heads = imported(source, tmp_path / "out", None)
    assert (found.target, found.n_heads, found.dtypes) == ("medusa-2", 5, ["float16"])
    check_medusa(heads, state)
    direct, facts = open_heads(str(source), target)
    assert (facts["name"], direct.n_heads) == ("medusa-2", 5)


@pytest.mark.parametrize("file", [HYDRA_PT, HYDRA_SAFE])
def test_tied_blocks_are_stored_once_and_what_is_not_the_heads_not_at_all(
    file: str, base: Path, tmp_path: Path
) -> None:
    state = hydra_state()
    source = save_heads_file(tmp_path / "published", file, state, HYDRA_CONFIG)
    import_heads(str(source), tmp_path / "out", str(base))
    stored = load_file(tmp_path / "out" / "heads.safetensors")
    distinct = {
        value.data_ptr(): value
        for name, value in state.items()
        if "embed_tokens" not in name and "input_embed" not in name and "inv_freq" not in name
    }
    sizes = sum(value.numel() for value in distinct.values())
    assert sum(value.numel() for value in stored.values()) == sizes
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_imported_heads_draft_losslessly_for_a_target_of_any_type(
    dtype: str, base: Path, tmp_path: Path
) -> None:
    source = save_heads_file(tmp_path / "published", HYDRA_PT, hydra_state(), HYDRA_CONFIG)
    target = load_target(base, dtype=dtype)
    heads, _ = open_heads(str(source), target)
    assert heads.dtype == target.dtype
    plain = Decoder(target, None, [EMPTY]).generate([2, 7, 1], Static(0), 12)
    drafted = Decoder(target, heads, [chain(4)]).generate([2, 7, 1], Static(0), 12)
    assert drafted.tokens == plain.tokens


def test_where_config_json_is_wrong_the_tensors_are_right(base: Path, tmp_path: Path) -> None:
    lies = {"hydra_num_heads": 7, "hydra_num_layers": 1, "hydra_head_arch": "eagle-attn"}
    config = {**HYDRA_CONFIG, **lies, "grounded_heads": False}
    source = save_heads_file(tmp_path / "published", HYDRA_PT, hydra_state(), config)
    found, heads = imported(source, tmp_path / "out", base)
    assert heads.n_heads == 4
    assert [note.split()[2] for note in found.notes] == [
        "hydra_head_arch",
        "hydra_num_heads",
        "hydra_num_layers",
        "grounded_heads",
    ]


def peak_kib(reset: bool = False) -> int:
    """The most memory this process has had, files that are mapped included, since a reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("file", [MEDUSA_PT, MEDUSA_SAFE])
def test_an_import_needs_little_more_memory_than_its_largest_tensor(
    file: str, tmp_path: Path
) -> None:
    state = medusa_state(n_heads=12, h=64, v=40_000)
    source = save_heads_file(tmp_path / "published", file, state, MEDUSA_CONFIG)
    largest = max(value.nbytes for value in state.values())
    total = sum(value.nbytes for value in state.values())
    del state
    import_heads(str(source), tmp_path / "out")  # what is loaded once is loaded
    try:
        before = peak_kib(reset=True)
    except OSError:
        pytest.skip("the peak cannot be reset here")
    import_heads(str(source), tmp_path / "out")
    grown = 1024 * (peak_kib() - before)
    assert grown < 2 * largest < total / 5

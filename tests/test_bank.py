"""A bank reads back as it was, and a file that is not whole and consistent is refused."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from entmtp_calib.bank import Bank, BankEntry
from entmtp_calib.errors import ArtifactError, HeadsError, TreeError
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Staged, Static
from entmtp_calib.signals import SignalSpec
from entmtp_calib.timing import Interval
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree, chain

SIGNAL = SignalSpec("path_value", 2)
BRANCHED = Tree(((0,), (1,), (0, 0), (0, 2), (1, 0)))
SLOW = Tree(((0,), (2,), (2, 1)))
PARTS = ("paths", "parents", "depths", "ancestor_mask")


def entry(tree: Tree, speed: float = 50.0) -> BankEntry:
    return BankEntry(
        tree=tree,
        mean_emitted_tokens=Interval(1.9, 2.1, 2.25),
        step_ms=31.5,
        tokens_per_second=Interval(speed - 1, speed, speed + 1.5),
        speedup_over_plain=Interval(1.1, 1.2, 1.3),
    )


def bank(*trees: Tree, **changes: Any) -> Bank:
    trees = trees or (EMPTY, chain(2), BRANCHED)
    values: dict[str, Any] = {
        "task": "gsm8k",
        "model": {"name": "toy", "fingerprint": "aa", "dtype": "float32", "hidden_size": 32},
        "heads": {"kind": "hydra", "n_heads": 4, "path": "heads", "fingerprint": "bb"},
        "entries": tuple(map(entry, trees)),
        "policies": {"static": Static(len(trees) - 1)},
        "best": len(trees) - 1,
        "hardware": {"cpu": "Some CPU", "usable_cores": 2},
        "splits": {"search": ["p0"], "select": ["p1"], "report": ["p2"]},
        "seeds": {"split": 0},
        "created": "2026-01-01T00:00:00+00:00",
        "notes": ("measured in a test \u2028 NaN",),
    }
    return Bank(**values | changes)


def stored(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What other programs see: the tensors and the document."""
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    assert list(metadata) == ["entmtp"]
    return load_file(path), json.loads(metadata["entmtp"])


def store(path: Path, arrays: dict[str, np.ndarray], document: Any) -> None:
    save_file(arrays, path, metadata={"entmtp": json.dumps(document)})


def refused(path: Path) -> str:
    with pytest.raises(ArtifactError) as error:
        Bank.load(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A saved bank."""
    path = tmp_path / "bank.safetensors"
    bank().save(path)
    return path


def with_extras() -> Bank:
    """A bank with two trees off the frontier, 3 and 4, and a policy that uses them."""
    unknown = Interval(math.nan, math.nan, math.nan)
    unmeasured = replace(entry(SLOW), tokens_per_second=unknown, speedup_over_plain=unknown)
    staged = Staged(((), (0.5,), (0.3,)), ((DRAFT_ON,), (0, DRAFT_ON), (3, 4)))
    return bank(
        extras=(entry(chain(1)), unmeasured),
        policies={"static": Static(2), "staged": staged},
        auto="staged",
    )


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """A saved bank with trees off the frontier."""
    path = tmp_path / "extended.safetensors"
    with_extras().save(path)
    return path


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree of up to 12 nodes, ranks not necessarily contiguous."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(0, 12))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 40)))
        if path not in paths:
            paths.append(path)
    return Tree(tuple(paths[1:]))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(trees(), min_size=1, max_size=5, unique_by=lambda tree: tree.n_nodes),
    st.lists(trees(), max_size=4, unique=True),
)
def test_any_bank_reads_back_as_it_was(
    tmp_path_factory: Any, found: list[Tree], more: list[Tree]
) -> None:
    path = tmp_path_factory.mktemp("bank") / "bank.safetensors"
    extras = tuple(entry(tree) for tree in more if tree not in found)
    original = bank(*sorted(found, key=lambda tree: tree.n_nodes), extras=extras)
    original.save(path)
    assert Bank.load(path) == original
    assert Bank.load(path).to_bytes() == path.read_bytes()


def test_a_bank_reads_back_from_its_run_folder_with_all_policies(tmp_path: Path) -> None:
    policies = {
        "static": Static(1),
        "ladder": Ladder(SIGNAL, (0.25, 0.5), (0, 1, 2)),
        "hysteresis": Hysteresis(SignalSpec("entropy"), 0, 2, tau_on=-0.5, tau_off=-1.5),
        "running": Hysteresis(SignalSpec("entropy", running=True), 0, 1, -0.5, -1.5),
        "staged": Staged(((), (0.5,), ()), ((DRAFT_ON,), (0, DRAFT_ON), (2,))),
    }
    original = bank(policies=policies, auto="staged")
    original.save(tmp_path / "bank.safetensors")
    assert Bank.load(tmp_path) == original


def test_policies_count_the_frontier_and_then_the_extras(extended: Path) -> None:
    read = Bank.load(extended)
    assert read.frontier == (EMPTY, chain(2), BRANCHED)
    assert read.trees == (EMPTY, chain(2), BRANCHED, chain(1), SLOW)
    assert read.policies == with_extras().policies
    assert read.auto == "staged"
    assert [read.find(tree.id) for tree in read.trees] == [0, 1, 2, 3, 4]
    assert read.extras[0] == entry(chain(1))
    assert math.isnan(read.extras[1].tokens_per_second.value)
    assert read.extras[1].mean_emitted_tokens == entry(SLOW).mean_emitted_tokens
    assert read.to_bytes() == extended.read_bytes()


def test_a_bank_needs_heads_for_its_extras_too() -> None:
    deep = bank(extras=(entry(chain(4)),))
    assert deep.depth == 4
    with pytest.raises(HeadsError, match="tree of depth 4 and there are 3 heads"):
        deep.check_against({}, {"n_heads": 3})


def test_extras_are_stored_like_the_frontiers_trees(extended: Path) -> None:
    arrays, document = stored(extended)
    names = [f"trees.{k}" for k in range(3)] + [f"extra_trees.{k}" for k in range(2)]
    assert sorted(arrays) == sorted(f"{name}.{part}" for name in names for part in PARTS)
    assert arrays["extra_trees.1.paths"].tolist() == [[0, -1], [2, -1], [2, 1]]
    assert arrays["extra_trees.1.parents"].tolist() == [-1, 0, 0, 2]
    assert [tree["id"] for tree in document["extra_trees"]] == ["chain-1", SLOW.id]
    assert document["extra_trees"][1]["tokens_per_second"] is None
    assert document["auto"] == "staged"


def test_a_bank_from_before_extras_and_auto_still_loads_as_static(path: Path) -> None:
    arrays, document = stored(path)
    del document["extra_trees"], document["auto"]
    store(path, arrays, document)
    assert Bank.load(path) == bank()
    assert Bank.load(path).auto == "static"
    assert Bank.load(path).extras == ()


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_tensor_of_an_extra_tree_is_named(extended: Path, part: str) -> None:
    arrays, document = stored(extended)
    name = f"extra_trees.1.{part}"
    changed = arrays[name].copy()
    changed[-1] = 0
    for other in (changed, arrays[name].astype(np.int32), arrays[name][:-1]):
        store(extended, arrays | {name: other}, document)
        assert "extra_trees.1." in refused(extended)
    store(extended, {key: value for key, value in arrays.items() if key != name}, document)
    assert "damaged" in refused(extended)


def test_extras_that_are_described_and_stored_in_other_numbers_are_refused(extended: Path) -> None:
    arrays, document = stored(extended)
    store(extended, arrays, document | {"extra_trees": document["extra_trees"][:1]})
    assert "1 extra_trees described, 2 stored" in refused(extended)
    fewer = {key: value for key, value in arrays.items() if not key.startswith("extra_trees.1")}
    store(extended, fewer, document)
    assert "2 extra_trees described, 1 stored" in refused(extended)
    none = {key: value for key, value in document.items() if key != "extra_trees"}
    store(extended, arrays, none)
    assert "0 extra_trees described, 2 stored" in refused(extended)
    gap = {key.replace("extra_trees.1", "extra_trees.2"): value for key, value in arrays.items()}
    store(extended, gap, document)
    assert "damaged" in refused(extended)


def test_a_tree_that_stands_twice_in_a_bank_is_refused(extended: Path) -> None:
    arrays, document = stored(extended)
    twice = {f"extra_trees.0.{part}": arrays[f"trees.1.{part}"] for part in PARTS}
    described = [document["trees"][1], document["extra_trees"][1]]
    store(extended, arrays | twice, document | {"extra_trees": described})
    assert "a tree stands in the bank twice" in refused(extended)
    with pytest.raises(ValueError, match="twice"):
        bank(extras=(entry(chain(2)),))


def test_auto_names_a_policy(extended: Path) -> None:
    arrays, document = stored(extended)
    store(extended, arrays, document | {"auto": "luck"})
    assert "auto is luck, one of static, staged is possible" in refused(extended)
    for change in ({"auto": 1}, {"auto": None}, {"extra_trees": None}, {"extra_trees": {}}):
        store(extended, arrays, document | change)
        assert "damaged" in refused(extended)
    with pytest.raises(ValueError, match="auto is ladder"):
        bank(auto="ladder")


def test_the_tensors_are_those_of_the_contract(path: Path) -> None:
    arrays, document = stored(path)
    assert sorted(arrays) == sorted(f"trees.{k}.{part}" for k in range(3) for part in PARTS)
    kinds = {part: arrays[f"trees.2.{part}"].dtype.name for part in PARTS}
    assert kinds == {
        "paths": "int16",
        "parents": "int16",
        "depths": "int16",
        "ancestor_mask": "uint8",
    }
    assert arrays["trees.2.paths"].tolist() == [[0, -1], [1, -1], [0, 0], [0, 2], [1, 0]]
    assert arrays["trees.2.parents"].tolist() == [-1, 0, 0, 1, 1, 2]
    assert arrays["trees.2.depths"].tolist() == [0, 1, 1, 2, 2, 2]
    assert arrays["trees.2.ancestor_mask"].tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    assert [tree["id"] for tree in document["trees"]] == ["plain", "chain-2", BRANCHED.id]
    assert document["trees"][1] == {
        "id": "chain-2",
        "n_nodes": 2,
        "depth": 2,
        "mean_acceptance_length": 2.1,
        "mean_acceptance_length_interval": [1.9, 2.25],
        "step_ms": 31.5,
        "tokens_per_second": 50.0,
        "tokens_per_second_interval": [49.0, 51.5],
        "speedup_over_plain": 1.2,
        "speedup_over_plain_interval": [1.1, 1.3],
    }
    assert document["format_version"] == 1
    for key in ("task", "model", "heads", "policies", "hardware", "splits", "seeds"):
        assert document[key], key


def test_the_empty_tree_is_a_root_alone(path: Path) -> None:
    arrays, _ = stored(path)
    assert arrays["trees.0.paths"].shape == (0, 0)
    assert arrays["trees.0.parents"].tolist() == [-1]
    assert arrays["trees.0.depths"].tolist() == [0]
    assert arrays["trees.0.ancestor_mask"].tolist() == [[1]]


def test_unbounded_and_undefined_figures_survive(path: Path) -> None:
    odd = replace(
        entry(chain(1)),
        speedup_over_plain=Interval(-math.inf, 1.0, math.inf),
        step_ms=math.nan,
    )
    replace(bank(), entries=(entry(EMPTY), odd), best=0, policies={}).save(path)
    read = Bank.load(path).entries[1]
    assert read.speedup_over_plain == odd.speedup_over_plain
    assert math.isnan(read.step_ms)


def test_a_tree_is_found_by_id_or_number() -> None:
    assert bank().find("chain-2") == bank().find("1") == bank().find(1) == 1
    assert bank().find("plain") == 0
    for name in ("chain-9", "3", -1, "-1", ""):
        with pytest.raises(TreeError, match="one of plain, chain-2, t5d2-"):
            bank().find(name)


def test_trees_out_of_order_or_indices_out_of_range_are_a_bug() -> None:
    with pytest.raises(ValueError, match="rising"):
        bank(chain(2), EMPTY)
    with pytest.raises(ValueError, match="rising"):
        bank(chain(2), Tree(((0,), (1,))))
    with pytest.raises(ValueError, match="best"):
        bank(best=3)
    with pytest.raises(ValueError, match="mine"):
        bank(policies={"mine": Ladder(SIGNAL, (0.5,), (0, 3))}, auto="mine")
    with pytest.raises(ValueError, match=r"staged chooses trees \(0, 3, 4\) of 3"):
        replace(with_extras(), extras=())


def test_the_same_model_and_heads_have_no_differences() -> None:
    moved = bank().model | {"name": "/elsewhere/toy"}
    assert bank().check_against(moved, bank().heads) == []
    assert bank().check_against({}, {}) == []


def test_another_model_or_heads_of_the_same_size_are_named() -> None:
    lines = bank().check_against(
        bank().model | {"fingerprint": "cc", "name": "other", "engine": "new"},
        bank().heads | {"fingerprint": "dd", "n_heads": 5},
    )
    assert lines == [
        "model name toy then, other now",
        "model fingerprint aa then, cc now",
        "heads n_heads 4 then, 5 now",
        "heads fingerprint bb then, dd now",
    ]


def test_sizes_that_differ_and_too_few_heads_are_refused() -> None:
    with pytest.raises(HeadsError, match="hidden_size 32 then, 16 now"):
        bank().check_against(bank().model | {"hidden_size": 16}, bank().heads)
    with pytest.raises(HeadsError, match="tree of depth 4 and there are 3 heads"):
        bank(EMPTY, HYDRA_DEFAULT).check_against({}, {"n_heads": 3})


def test_a_file_cut_at_any_length_is_refused(path: Path) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for cut in (0, 1, 7, 8, 9, 8 + length // 2, 8 + length - 1, 8 + length, len(data) - 1):
        path.write_bytes(data[:cut])
        assert "damaged" in refused(path)
    path.write_bytes(data + b"\0")
    assert "damaged" in refused(path)


def test_a_header_that_claims_terabytes_is_refused_at_once(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 10**13) + b"{}")
    assert "damaged" in refused(path)
    big = {"trees.0.paths": {"dtype": "I16", "shape": [10**12, 5], "data_offsets": [0, 10**13]}}
    header = json.dumps(big).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert "instead of 10000000000000" in refused(path)


@pytest.mark.parametrize("data", [b"[]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": 0}}', b"\xff"])
def test_a_header_of_rubbish_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(data)) + data)
    assert "damaged" in refused(path)


def test_files_that_are_no_banks_are_named(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none")
    with pytest.raises(ArtifactError, match=r"bank\.safetensors: No such file"):
        Bank.load(tmp_path)
    save_file({"weight": np.zeros(3, np.int16)}, tmp_path / "other", metadata={"a": "b"})
    assert "is not a bank" in refused(tmp_path / "other")
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "weights")
    assert "is not a bank" in refused(tmp_path / "weights")
    (tmp_path / "lfs").write_text("version https://git-lfs.github.com/spec/v1\noid x\nsize 1\n")
    assert "git lfs pull" in refused(tmp_path / "lfs")


def test_another_format_version_is_named(path: Path) -> None:
    arrays, document = stored(path)
    store(path, arrays, document | {"format_version": 2, "trees": "of another shape"})
    assert "has format version 2; expected format version 1" in refused(path)


@pytest.mark.parametrize("part", PARTS)
def test_a_tensor_that_does_not_fit_its_tree_is_named(path: Path, part: str) -> None:
    arrays, document = stored(path)
    name = f"trees.2.{part}"
    whole = arrays[name]
    changed = whole.copy()
    changed[-1] = 0
    retyped = whole.astype(np.int16 if whole.dtype == np.uint8 else np.uint8)
    for other in (changed, retyped, whole[:-1]):
        store(path, arrays | {name: other}, document)
        assert "trees.2." in refused(path)
    store(path, {key: value for key, value in arrays.items() if key != name}, document)
    assert "damaged" in refused(path)


def test_unknown_tensors_and_nodes_out_of_order_are_refused(path: Path) -> None:
    arrays, document = stored(path)
    store(path, arrays | {"trees.7.paths": arrays["trees.1.paths"]}, document)
    assert r"trees.7.paths" in refused(path)
    swapped = arrays["trees.2.paths"][[1, 0, 2, 3, 4]]
    store(path, arrays | {"trees.2.paths": swapped}, document)
    assert "trees.2.paths" in refused(path)


@pytest.mark.parametrize(
    "change",
    [
        {"trees": []},
        {"trees": [1, 2, 3]},
        {"best": 9},
        {"best": None},
        {"policies": {"mine": {"name": "unknown"}}},
        {"policies": {"mine": {"name": "static", "index": 3}}},
        {"policies": {"mine": 1}},
        {"model": None},
        {"notes": "text"},
    ],
)
def test_a_document_that_does_not_fit_is_refused(path: Path, change: dict[str, Any]) -> None:
    arrays, document = stored(path)
    store(path, arrays, document | change)
    assert "damaged" in refused(path)


@pytest.mark.parametrize("change", [{"id": "x"}, {"step_ms": "fast"}, {"n_nodes": 1}])
def test_an_entry_that_does_not_fit_its_tree_is_refused(path: Path, change: dict[str, Any]) -> None:
    arrays, document = stored(path)
    document["trees"][2] |= change
    store(path, arrays, document)
    assert "does not fit together" in refused(path)


def test_a_bank_is_read_without_torch(path: Path) -> None:
    code = (
        "import sys, pathlib; from entmtp_calib.bank import Bank; "
        f"Bank.load(pathlib.Path({str(path)!r})).save(pathlib.Path({str(path)!r})); "
        "print({'torch', 'transformers', 'pandas', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

"""Whatever a form's writer wrote is read back; users' own files are recognised, and told apart."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from traces import random_tree

from entmtp_calib.errors import TreeError, UsageError
from entmtp_calib.formats.chains import (
    AdaptiveRule,
    SglangNumbers,
    adaptive_file,
    schedule_config,
)
from entmtp_calib.formats.engines import FORMS
from entmtp_calib.formats.lists import leaf_flag, node_list, node_yaml, token_tree
from entmtp_calib.formats.literals import MAX_BYTES
from entmtp_calib.formats.profile import Profile, speculation_profile
from entmtp_calib.formats.reading import READABLE, Limits, read
from entmtp_calib.formats.trees_file import trees_document
from entmtp_calib.tree import HYDRA_DEFAULT, Tree, chain

SMALL = Tree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
TREES = st.builds(random_tree, st.integers(0, 10_000)).filter(lambda t: t.n_nodes)
PROFILE = Profile((4, 2, 1, 1), 2.0)
MEDUSA = """# trees
import os
mc_sim_7b_63 = [[0], [1], [0, 0]]
wide = [(0,), (1,),
        (2,)]
sizes, names = [1, 2, 3], ["x"]
print("nothing is run")
"""


def profile_of(tree: Tree) -> str:
    conditions = {"split": "report", "tree_choices": tree.to_list()}
    return speculation_profile(PROFILE, "hydra", "target", "heads", conditions)


WRITERS = {
    "medusa": node_list,
    "trtllm": leaf_flag,
    "trtllm-bench": lambda tree: node_yaml(tree, ["read by: [x]"]),
    "vllm-tree": token_tree,
    "eagle": node_list,
    "modelopt": profile_of,
}


def trees_of(text: str, form: str | None = None) -> dict[str, Tree]:
    return {each.name: each.tree for each in read(text.encode(), "file", form)}


@pytest.mark.parametrize("form", WRITERS)
@given(tree=TREES)
def test_a_tree_reads_back_from_what_was_written(form: str, tree: Tree) -> None:
    text = WRITERS[form](tree)
    assert list(trees_of(text, form).values()) == [tree]
    assert list(trees_of(text).values()) == [tree]


@given(st.sets(st.integers(1, 12), min_size=1), st.integers(1, 8))
def test_chains_read_back_from_what_was_written(depths: set[int], steps: int) -> None:
    chains = [chain(depth) for depth in sorted(depths)]
    assert list(trees_of(adaptive_file(sorted(depths), AdaptiveRule())).values()) == chains
    ranges = [(n, n, depth) for n, depth in enumerate(sorted(depths, reverse=True), start=1)]
    assert list(trees_of(schedule_config(ranges)).values()) == chains
    flags = SglangNumbers(steps, 1, steps + 1).flags()
    assert trees_of(flags, "sglang") == {"file": chain(steps)}


def test_every_form_can_be_read() -> None:
    assert {*FORMS, "dense"} == set(READABLE)
    assert set(FORMS) - set(WRITERS) == {"vllm-schedule", "sglang", "sglang-adaptive", "sequoia"}


@pytest.mark.parametrize(
    ("text", "form", "tree"),
    [
        (str(SMALL.to_list()), "medusa", SMALL),
        (str(list(SMALL.paths)), "medusa", SMALL),
        (yaml.dump(SMALL.to_list()), "medusa", SMALL),
        (yaml.dump({"medusa_choices": SMALL.to_list()}), "medusa", SMALL),
        (f"# mine\n{SMALL.to_list()}  # all\n", "medusa", SMALL),
        (f"\ufeff{SMALL.to_list()}", "medusa", SMALL),
        ("[[0, 0, 0], [0, 1], [1, 0]]", "trtllm", SMALL),
        ("- [0, 0, 0]\n- [0, 1]\n- [1, 0]\n", "trtllm", SMALL),
        ("run.py --medusa_choices=[[0,0],[1]] -t 0", "trtllm", Tree.of([[0], [1], [0, 0]])),
        ("[1, 2, 1]", "dense", Tree.of([[0], [1], [0, 0], [1, 0]])),
        ("medusa_choices = [1, 2]", "dense", Tree.of([[0], [1]])),
        ('"[(0,), (0, 0)]"', "medusa", chain(2)),
        ('{"speculative_token_tree": "[(0,), (0,0)]", "method": "eagle"}', "medusa", chain(2)),
        ('{"decoding_config": {"medusa_choices": [[0]]}, "beams": [1, 2]}', "medusa", chain(1)),
        (
            "--speculative-eagle-topk=1 --speculative-num-steps=2 --speculative-num-draft-tokens=3",
            "sglang",
            chain(2),
        ),
    ],
)
def test_a_users_own_file_is_recognised(text: str, form: str, tree: Tree) -> None:
    (listed,) = read(text.encode(), "file")
    assert (listed.form, listed.tree, listed.problems()) == (form, tree, [])


def test_a_python_file_gives_its_lists_by_name_and_is_not_run() -> None:
    assert trees_of(MEDUSA) == {
        "mc_sim_7b_63": Tree.of([[0], [1], [0, 0]]),
        "wide": Tree.of([[0], [1], [2]]),
    }


def test_several_trees_of_a_file_keep_their_names_or_numbers() -> None:
    ours = json.dumps(trees_document([("a", SMALL), ("b", chain(2))], "source"))
    assert trees_of(ours) == {"a": SMALL, "b": chain(2)}
    assert trees_of("[[[0]], [[0], [1]]]") == {"file[0]": chain(1), "file[1]": Tree.of([[0], [1]])}
    assert len(trees_of('{"trees": [[[0]], [[0], [1]]]}')) == 2
    assert trees_of("{one: [[0]], two: [[0], [0, 0]], n: [1, 2]}") == {
        "one": chain(1),
        "two": chain(2),
    }


def test_leaves_say_how_many_prefixes_they_imply() -> None:
    (listed,) = read(b"[[0, 0, 0], [1]]", "file")
    assert (listed.form, listed.implied, listed.tree.n_nodes) == ("trtllm", 2, 4)


def test_a_list_with_a_missing_prefix_is_no_list_of_leaves_unless_it_is_said_to_be_one() -> None:
    text = b"[[0], [0, 0], [1, 0]]"
    (listed,) = read(text, "mine")
    assert listed.problems() == ["mine: [1, 0] lacks its parent [1]"]
    (listed,) = read(text, "mine", "trtllm")
    assert listed.tree == Tree.of([[0], [1], [0, 0], [1, 0]])


def test_each_thing_that_is_wrong_is_a_line() -> None:
    (listed,) = read(b"[[0], [0], [12], [-1], [], [0, 0, 0], [0, 0], [2, 1, 0]]", "mine")
    assert listed.problems() == [
        "mine: [0] is listed 2 times",
        "mine: [-1] has a child rank outside 0 to 32767",
        "mine: [] is listed, and the root is implied",
        "mine: [2, 1, 0] lacks its parent [2, 1]",
    ]
    assert set(listed.problems(Limits(n_heads=2, n_ranks=10))) - set(listed.problems()) == {
        "mine: [12] has child rank 12, and the heads rank 10 choices",
        "mine: [0, 0, 0] has depth 3, and there are 2 heads",
        "mine: [2, 1, 0] has depth 3, and there are 2 heads",
    }


def test_the_published_default_fits_four_heads_of_ten_choices_and_nothing_less() -> None:
    (listed,) = read(node_list(HYDRA_DEFAULT).encode(), "hydra")
    assert listed.problems(Limits(4, 10)) == []
    assert len(listed.problems(Limits(3, 10))) == 2
    assert listed.problems(Limits(4, 9)) == [
        f"hydra: {path} has child rank 9, and the heads rank 9 choices"
        for path in ([9], [0, 9], [0, 0, 9])
    ]


def test_an_empty_list_has_no_node() -> None:
    (found,) = [each.problems() for each in read(b'{"medusa_choices": [[]]}', "x")]
    assert found == ["x: [] is listed, and the root is implied"]
    with pytest.raises(TreeError, match="there is no tree in it"):
        read(b"[]", "x")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "there is no tree in it|neither JSON"),
        (b"just words", "neither JSON nor YAML nor a Python literal"),
        (b"\xff\xfe", "no text in UTF-8"),
        (b"7", "there is no tree in it"),
        (b'{"seeds": [1, 2, 3], "names": ["a"]}', "there is no tree in it"),
        (b"[7, 6]", r"counts \[7, 6\]"),
        (b"[[0], 1]", "neither paths nor counts"),
        (b"[[0.5]]", "neither paths nor counts"),
        (b"[[true]]", "neither paths nor counts"),
        (b"[" * 5000, "neither JSON|without end"),
        (b"[" * 300 + b"]" * 300, "neither paths nor counts|without end"),
        (b"a: &x [[0]]\nb: *x\n", "neither JSON nor YAML"),
        (b'{"trees": [{"name": "a"}]}', "a tree without paths"),
        (b'{"candidate_steps": "all"}', "no steps that are numbers"),
        (b'{"candidate_steps": [900]}', "depth 900"),
        (b'{"num_speculative_tokens_per_batch_size": [3]}', "no steps that are numbers"),
        (b"__import__('os').getcwd()", "neither JSON"),
        (
            b"--speculative-num-steps 3 --speculative-eagle-topk 2 "
            b"--speculative-num-draft-tokens 6",
            "names no tree",
        ),
        (
            b"--speculative-num-steps 3 --speculative-eagle-topk 1 "
            b"--speculative-num-draft-tokens 6",
            "numbers that SGLang takes",
        ),
        (str([[0] * 200]).encode(), "depth 200"),
        (str([[n] for n in range(2000)]).encode(), "2000 nodes"),
        (str([[n] + [0] * 100 for n in range(20)]).encode(), "2020 nodes"),
        (b" " * (MAX_BYTES + 1), "bytes; expected at most"),
    ],
)
def test_what_holds_no_tree_is_one_error(data: bytes, problem: str) -> None:
    with pytest.raises(TreeError, match=problem):
        read(data, "file")


def test_a_form_that_is_said_must_be_the_one_that_is_there() -> None:
    assert read(b"[[0, 0], [1]]", "file", "trtllm-bench")[0].form == "trtllm-bench"
    for text, form in (("[1, 2]", "medusa"), ("[[0]]", "dense"), ("[[0]]", "sglang")):
        with pytest.raises(TreeError, match=f"expected {form}, as --format says"):
            read(text.encode(), "file", form)
    with pytest.raises(UsageError, match="--format tree"):
        read(b"[[0]]", "file", "tree")
    assert read(b"{mine: [1, 2]}", "file", "dense")[0].name == "mine"


@given(st.text(max_size=60))
def test_any_text_is_trees_or_one_error(text: str) -> None:
    try:
        found: list[Any] = read(text.encode(), "file")
    except TreeError:
        return
    assert found


@given(st.recursive(st.integers(-2, 40) | st.text(max_size=3), st.lists, max_leaves=12))
def test_any_literal_is_trees_or_one_error(value: Any) -> None:
    try:
        found = read(repr(value).encode(), "file")
    except TreeError:
        return
    for listed in found:
        assert listed.problems() or listed.tree.n_nodes
    assert ast.literal_eval(repr(value)) == value

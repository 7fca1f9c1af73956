"""Plans: topologies on a device, and trees that the heads cannot draft."""

from __future__ import annotations

import pytest
import torch
import toys
from toy_heads import random_heads

from entmtp_calib.errors import TreeError
from entmtp_calib.plan import Plan, Rows, check_tree
from entmtp_calib.topology import compile_tree
from entmtp_calib.tree import EMPTY, Tree, chain

BRANCHED = Tree.of([(0,), (2,), (0, 1), (2, 0), (0, 1, 3)])


def plan(tree: Tree) -> Plan:
    return Plan(compile_tree(tree), torch.device("cpu"))


def test_a_plan_has_the_topologys_rows() -> None:
    built = plan(BRANCHED)
    assert (built.tree, built.n_rows) == (BRANCHED, 6)
    assert built.parents == [-1, 0, 0, 1, 2, 3]
    assert built.depth_list == built.depths.tolist() == [0, 1, 1, 2, 2, 3]
    assert built.mask is not None
    assert (built.mask.numpy() == compile_tree(BRANCHED).ancestor_mask).all()


def test_a_levels_paths_lead_from_the_root_to_each_parent() -> None:
    levels = plan(BRANCHED).levels
    assert [level.path_rows.tolist() for level in levels] == [
        [[0]],
        [[0, 1], [0, 2]],
        [[0, 1, 3]],
    ]
    assert [(level.first, level.end) for level in levels] == [(1, 3), (3, 5), (5, 6)]


def test_a_level_picks_each_nodes_rank_among_its_parents_choices() -> None:
    chosen = torch.arange(40).view(2, 20)  # parent 0 chooses 0 .. 19, parent 1 chooses 20 .. 39
    levels = plan(BRANCHED).levels
    picked = [level.pick(chosen[: len(level.path_rows)]).tolist() for level in levels]
    assert picked == [[0, 2], [1, 20], [3]]


def test_a_chain_needs_no_mask_and_a_side_branch_does() -> None:
    assert [plan(chain(depth)).mask for depth in range(4)] == [None] * 4
    assert plan(Tree.of([(0,), (1,)])).mask is not None
    assert plan(Tree.of([(3,), (3, 5)])).mask is None  # a path of other ranks is a chain too
    rows = Rows([-1, 0, 0], [0, 1, 1], torch.tensor([0, 1, 1]), torch.eye(3, dtype=torch.bool))
    assert rows.mask is not None


def test_rows_are_counted_to_a_depth() -> None:
    assert [plan(BRANCHED).rows_to(depth) for depth in (0, 1, 2, 3, 9)] == [1, 3, 5, 6, 6]
    assert plan(EMPTY).rows_to(0) == plan(EMPTY).rows_to(4) == 1


def test_heads_must_be_as_deep_and_as_wide_as_a_tree() -> None:
    target = toys.rand()
    heads = random_heads(target, n_heads=2, draft_ids=[1, 4, 7])
    check_tree(EMPTY, None)
    check_tree(Tree.of([(2,), (2, 0)]), heads)
    with pytest.raises(TreeError, match="depth 3, and there are 2 heads"):
        check_tree(chain(3), heads)
    with pytest.raises(TreeError, match=r"child rank 3; expected ranks below 3"):
        check_tree(Tree.of([(3,)]), heads)
    with pytest.raises(TreeError, match="there are 0 heads"):
        check_tree(chain(1), None)

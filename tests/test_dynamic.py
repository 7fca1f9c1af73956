"""Dynamic trees against EAGLE-2's rule written out in plain loops, and what they cannot do."""

from __future__ import annotations

import pytest
import torch
import toys
from torch import Tensor
from toy_heads import perfect_cycle_heads, random_heads

from entmtp_calib.decoding import Decoder
from entmtp_calib.drafting import Proposal, Start
from entmtp_calib.dynamic import Dynamic, DynamicProposer
from entmtp_calib.errors import TreeError
from entmtp_calib.heads.model import Heads
from entmtp_calib.policy import Static
from entmtp_calib.tree import EMPTY, chain

ROOT = 4
PROMPT = [3, 1, 4, 1, 5]
Path = tuple[int, ...]
RULES = [
    Dynamic(1, 9, 3),
    Dynamic(2, 5, 2),
    Dynamic(3, 12, 3),
    Dynamic(4, 30, 3),
    Dynamic(50, 8, 1),
]


def by_the_rule(heads: Heads, vector: Tensor, dynamic: Dynamic) -> list[Path]:
    """Token paths of the tree, by expanding one path after the other and sorting all nodes."""
    width = min(dynamic.expand, heads.n_ranks)
    level, nodes = [((ROOT,), 1.0)], []
    for depth in range(1, dynamic.depth + 1):
        drafted = []
        for path, value in level:
            ids, probs = heads.draft_level(depth, vector, torch.tensor([path]))
            for token, prob in list(zip(ids[0].tolist(), probs[0].tolist(), strict=True))[:width]:
                drafted.append(((*path, token), value * min(prob, 1.0)))
        nodes += drafted
        level = sorted(drafted, key=lambda node: -node[1])[: dynamic.expand]
    return [path for path, _ in sorted(nodes, key=lambda node: -node[1])[: dynamic.nodes]]


def proposed(heads: Heads, vector: Tensor, dynamic: Dynamic, room: int = 99) -> Proposal:
    start = Start(ROOT, torch.zeros(1), vector, room)
    return DynamicProposer(dynamic, heads, heads.device).propose(start)


def token_paths(proposal: Proposal) -> list[Path]:
    ids = proposal.ids.tolist()
    paths: list[Path] = [(ids[0],)]
    for token, parent in zip(ids[1:], proposal.rows.parents[1:], strict=True):
        paths.append((*paths[parent], token))  # fails unless parents stand before their children
    return paths


@pytest.mark.parametrize("dynamic", RULES, ids=str)
@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_the_tree_is_the_rule_written_out(dynamic: Dynamic, kind: str) -> None:
    target = toys.rand()
    heads = random_heads(target, kind, draft_ids=[1, 2, 3, 5, 7, 8])
    for vector in torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(1)):
        paths = token_paths(proposed(heads, vector, dynamic))
        assert sorted(paths[1:]) == sorted(by_the_rule(heads, vector, dynamic))
        assert {path[:-1] for path in paths[1:]} <= set(paths)


def test_of_equally_probable_nodes_the_shallower_and_the_earlier_are_kept() -> None:
    """Medusa heads of zeros find every token equally probable; those of depth 1 are sure."""
    target = toys.cycle()
    heads = perfect_cycle_heads(target, n_heads=2)
    heads.head(2).projection.weight.data.zero_()  # type: ignore[union-attr]
    vector = torch.eye(64)[10]
    paths = token_paths(proposed(heads, vector, Dynamic(3, 2, 2)))
    assert paths == [(ROOT,), (ROOT, 12), (ROOT, 12, paths[2][2])]
    heads.head(1).projection.weight.data.zero_()  # type: ignore[union-attr]
    rows = proposed(heads, vector, Dynamic(3, 5, 2)).rows
    assert rows.depth_list == [0, 1, 1, 1, 2, 2]
    assert rows.parents == [-1, 0, 0, 0, 1, 1]


def test_the_rows_hang_together() -> None:
    target = toys.rand()
    heads = random_heads(target)
    proposal = proposed(heads, torch.randn(target.hidden_size), Dynamic(4, 15, 3))
    paths, rows = token_paths(proposal), proposal.rows
    assert rows.n_rows == 16
    assert rows.depths.tolist() == rows.depth_list == sorted(len(path) - 1 for path in paths)
    assert rows.mask is not None
    seen = [[other == path[: len(other)] for other in paths] for path in paths]
    assert rows.mask.tolist() == seen


def test_one_path_per_level_is_the_greedy_chain() -> None:
    target = toys.rand()
    heads = random_heads(target)
    dynamic = Decoder(target, heads, [chain(3)]).generate(PROMPT, Dynamic(1, 3, 3), 40)
    static = Decoder(target, heads, [chain(3)]).generate(PROMPT, Static(0), 40)
    assert dynamic.tokens == static.tokens
    assert [s.accepted_draft_tokens for s in dynamic.steps] == [
        s.accepted_draft_tokens for s in static.steps
    ]
    assert proposed(heads, torch.zeros(target.hidden_size), Dynamic(1, 3, 3)).rows.mask is None


def test_a_tree_of_the_whole_vocabulary_accepts_every_step_in_full() -> None:
    target = toys.rand()
    decoder = Decoder(target, random_heads(target), [EMPTY])
    steps = decoder.generate(PROMPT, Dynamic(10, 110, 2), 60).steps
    assert [step.accepted_draft_tokens for step in steps] == [2] * 20
    assert {(step.tree, step.rows, step.levels) for step in steps} == {(-1, 111, 2)}


def test_a_step_has_no_more_nodes_than_were_drafted() -> None:
    target = toys.rand()
    decoder = Decoder(target, random_heads(target), [EMPTY])
    steps = decoder.generate(PROMPT, Dynamic(2, 1000, 2), 9).steps
    assert {step.rows for step in steps} <= {7, 0}


def test_without_positions_for_all_levels_a_step_is_plain() -> None:
    target = toys.rand()
    vector = torch.zeros(target.hidden_size)
    heads = random_heads(target)
    assert proposed(heads, vector, Dynamic(2, 6, 3), room=3).rows.n_rows == 7
    plain = proposed(heads, vector, Dynamic(2, 6, 3), room=2)
    assert (plain.ids.tolist(), plain.rows.n_rows, plain.levels) == ([ROOT], 1, 0)


def test_the_heads_must_reach_the_depth() -> None:
    target = toys.rand()
    deep = Dynamic(2, 6, 4)
    with pytest.raises(TreeError, match="depth 4, and there are 3 heads"):
        Decoder(target, random_heads(target), [EMPTY]).generate(PROMPT, deep, 5)
    with pytest.raises(TreeError, match="there are 0 heads"):
        Decoder(target, None, [EMPTY]).generate(PROMPT, deep, 5)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="below 1"):
        Dynamic(*sizes)

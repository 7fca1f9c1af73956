"""Bench: figures are totals, prompts chose nothing, peers write as much as plain decoding."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import toys
from toy_bank import write_prompts
from toy_heads import perfect_cycle_heads, random_heads, save_for

from entmtp_calib.artifacts import RunFolder
from entmtp_calib.bank import Bank, BankEntry
from entmtp_calib.config import AcceptanceConfig, BenchConfig, BuildConfig
from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import DataError, HeadsError, UsageError
from entmtp_calib.policy import Static
from entmtp_calib.prompts import load_prompts, split
from entmtp_calib.stages.bench_figures import method_rows
from entmtp_calib.stages.bench_methods import Workbench, build
from entmtp_calib.stages.bench_prompts import Unused, take, unused_prompts
from entmtp_calib.stages.decode import Session
from entmtp_calib.stages.peers import Peers
from entmtp_calib.stages.setup import Inputs
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.timing import Interval
from entmtp_calib.tree import EMPTY, chain

ONES = Interval(1.0, 1.0, 1.0)
SIZES = (3, 2, 2)


# Figures.


def timed(method: str, prompt: str, seconds: float, **changes: Any) -> dict[str, Any]:
    return {
        "method": method,
        "prompt": prompt,
        "round": 0,
        "tokens": 12,
        "steps": 12,
        "passes": 11,
        "switches": 0,
        "seconds": seconds,
        "prefill_seconds": 1.0,
        "decode_seconds": seconds - 1.0,
        "same": True,
        **changes,
    }


RUNS = [
    timed("plain", "a", 5.0),
    timed("plain", "a", 3.0, round=1),
    timed("fast", "a", 2.0, steps=4, passes=4, switches=1),
    timed("fast", "a", 2.0, round=1, steps=4, passes=4, switches=2, same=False),
    timed("broken", "a", 9.0),
    timed("fast", "b", 2.0, steps=6, passes=5, switches=0),
    timed("fast", "b", 2.0, round=1, steps=6, passes=5, switches=0),
    timed("plain", "b", 4.0),
    timed("plain", "b", 4.0, round=1),
]
METHODS = {"plain": True, "fast": False, "broken": True}


def test_figures_are_totals_over_totals() -> None:
    plain, fast, _ = method_rows(METHODS, RUNS, {"broken": "RuntimeError: ours"})
    assert (plain["tokens"], plain["seconds"], plain["tokens_per_second"]) == (48, 16, 3)
    assert (fast["prefill_seconds"], fast["decode_seconds"]) == (4, 4)
    assert fast["tokens_per_second"] == 48 / 8
    assert fast["decode_tokens_per_second"] == 48 / 4
    assert fast["mean_emitted_tokens"] == 48 / 20
    assert fast["mean_accepted_draft_tokens"] == pytest.approx(28 / 20)
    assert fast["step_ms"] == pytest.approx(4000 / 18)
    assert fast["switches"] == 3
    assert (fast["texts"], fast["tokens_compared"], fast["divergences"]) == (4, 48, 1)
    assert fast["ratio_to_plain"] == pytest.approx(16 / 8)
    assert fast["ratio_to_plain_low"] <= 2 <= fast["ratio_to_plain_high"]


def test_a_baseline_that_took_no_part_has_no_column() -> None:
    rows = method_rows(METHODS, RUNS, {"broken": "RuntimeError: ours"})
    assert all("ratio_to_static" not in row for row in rows)


def test_a_method_that_failed_has_its_error_and_no_figures() -> None:
    *others, broken = method_rows(METHODS, RUNS, {"broken": "RuntimeError: ours"})
    assert broken["error"] == "RuntimeError: ours"
    assert broken["texts"] == 1
    assert "tokens_per_second" not in broken
    assert others == method_rows(METHODS, RUNS, {"broken": "anything else"})[:2]


# Prompts.


def save_bank(folder: Path, data: Path | None, splits: dict[str, Any]) -> Bank:
    """A bank of one chain in a run folder that names `data`, or alone."""
    bank = Bank(
        task="custom",
        model={},
        heads={},
        entries=tuple(BankEntry(tree, ONES, 1.0, ONES, ONES) for tree in (EMPTY, chain(2))),
        policies={"static": Static(1)},
        best=1,
        splits=splits,
        seeds={"splits": 5},
    )
    folder.mkdir(exist_ok=True)
    if data:
        settings = BuildConfig(task="custom", seed=5).to_dict()
        config = {"settings": settings, "inputs": asdict(Inputs(data=str(data)))}
        RunFolder.create(folder, config).close()
    bank.save(folder / "bank.safetensors")
    return bank


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", [f"t{n}" for n in range(64)], 12)


def split_ids(data: Path) -> dict[str, list[str]]:
    parts = split(load_prompts("custom", data).prompts, SIZES, 5)
    return {name: [p.id for p in getattr(parts, name)] for name in ("search", "select", "report")}


def test_the_report_split_comes_first_and_what_chose_a_tree_never_comes(
    tmp_path: Path, data: Path
) -> None:
    splits = split_ids(data)
    bank = save_bank(tmp_path / "run", data, splits)
    unused = unused_prompts(tmp_path / "run", bank)
    ids = [prompt.id for prompt in unused.prompts]
    assert ids[:2] == splits["report"]
    assert unused.report == set(splits["report"])
    assert len(ids) == 12 - 5
    assert not {*ids} & {*splits["search"], *splits["select"]}
    assert not unused.notes


def test_other_data_is_used_without_the_texts_that_chose_a_tree(tmp_path: Path, data: Path) -> None:
    splits = split_ids(data)
    bank = save_bank(tmp_path / "run", data, splits)
    texts = {prompt.id: prompt.messages[-1][1] for prompt in load_prompts("custom", data).prompts}
    chose = {texts.pop(name) for name in (*splits["search"], *splits["select"])}
    other = tmp_path / "other.jsonl"  # the same texts under other ids, and one more
    free = {*texts.values(), "t1 t2 t3"}
    other.write_text("\n".join(json.dumps({"prompt": text}) for text in [*chose, *free]))
    unused = unused_prompts(tmp_path / "run", bank, data=str(other))
    assert {prompt.messages[-1][1] for prompt in unused.prompts} == free
    assert not unused.notes
    assert not unused.report


def test_data_that_has_changed_is_refused(tmp_path: Path, data: Path) -> None:
    bank = save_bank(tmp_path / "run", data, split_ids(data))
    write_prompts(data, [f"t{n}" for n in range(32)], 12)  # the same ids, other texts
    with pytest.raises(DataError, match="no longer holds"):
        unused_prompts(tmp_path / "run", bank)


def test_a_bank_that_does_not_say_what_chose_its_trees_is_noted(tmp_path: Path, data: Path) -> None:
    bank = save_bank(tmp_path, None, {})
    unused = unused_prompts(tmp_path / "bank.safetensors", bank, data=str(data))
    assert len(unused.prompts) == 12
    assert len(unused.notes) == 1


# A session on CYCLE, whose next token is always the current one plus 1.


def session(target: Target, n_heads: int = 4, kind: str = "medusa") -> Session:
    heads = perfect_cycle_heads(target, n_heads) if kind == "medusa" else random_heads(target, kind)
    entries = tuple(BankEntry(tree, ONES, 1.0, ONES, ONES) for tree in (EMPTY, chain(2)))
    bank = Bank("custom", {}, {}, entries, {"static": Static(1)}, best=1)
    return Session(bank, target, heads, bank.trees, "raw", ())


def test_prompts_that_leave_no_room_are_passed_over(tmp_path: Path) -> None:
    texts = ["t1 " * 500, "t5 t6", "t7 t8"]
    file = tmp_path / "p.jsonl"
    rows = [{"id": f"{n}", "prompt": text} for n, text in enumerate(texts)]
    file.write_text("\n".join(map(json.dumps, rows)))
    unused = Unused(load_prompts("custom", file).prompts, frozenset({"0", "1"}), "", "custom")
    taken = take(unused, session(toys.cycle()), None, max_new_tokens=20)
    assert taken.too_long == ("0",)
    assert [prompt.id for prompt in taken.prompts] == ["1", "2"]
    assert taken.origin.endswith("and behind it")
    with pytest.raises(UsageError, match="--max-new-tokens 508"):
        take(unused, session(toys.cycle()), None, max_new_tokens=508)


# Methods.


def built(workbench: Workbench, *names: str) -> tuple[list[str], str]:
    methods, notes = build(names, workbench)
    return list(methods), "\n".join(notes)


def test_what_cannot_be_here_is_a_note() -> None:
    shallow = Workbench(session(toys.cycle(), n_heads=2), Inputs(), BenchConfig())
    shallow.heads_facts = {}  # toy heads have no folder
    names, notes = built(shallow, "plain", "medusa-default", "hydra-default", "ladder")
    assert names == ["plain"]
    assert "medusa-default takes no part: tree hydra-default has depth 4" in notes
    assert "hydra-default takes no part: the bank's heads are medusa heads" in notes
    assert "ladder takes no part: the bank has no such policy" in notes
    hydra = Workbench(session(toys.cycle(), kind="hydra"), Inputs(), BenchConfig())
    assert "no Medusa heads for cycle" in built(hydra, "medusa-default")[1]


def test_typical_acceptance_claims_nothing_but_plain_decoding_stays_plain() -> None:
    config = BenchConfig(temperature=0.7, acceptance=AcceptanceConfig("typical"))
    workbench = Workbench(session(toys.cycle(), kind="hydra"), Inputs(), config)
    methods, _ = build(["plain", "static", "eagle2"], workbench)
    claims = {name: method.claims_lossless for name, method in methods.items()}
    assert claims == {"plain": True, "static": False, "eagle2": False}


def test_nats_are_weighed_by_tokens_and_compared_with_plain_decodings() -> None:
    runs = [
        timed("plain", "a", 5.0, tokens=10, nll=1.0),
        timed("plain", "b", 5.0, tokens=30, nll=2.0),
        timed("fast", "a", 5.0, tokens=10, nll=1.5),
        timed("fast", "b", 5.0, tokens=10, nll=2.5),
    ]
    plain, fast = method_rows({"plain": True, "fast": False}, runs, {})
    assert (plain["nll"], plain["nll_difference"]) == (1.75, 0.0)
    assert (fast["nll"], fast["nll_difference"]) == (2.0, 0.25)


def test_eagle2_has_the_best_static_trees_size() -> None:
    workbench = Workbench(session(toys.cycle(), kind="hydra"), Inputs(), BenchConfig())
    bank = workbench.session.bank
    methods, _ = build(["plain", "eagle2"], workbench)
    texts = [methods[name].generate([0, 1], 20).tokens for name in ("plain", "eagle2")]
    assert texts[0] == texts[1]
    assert bank.trees[bank.best].n_nodes > 0


def test_transformers_takes_part_at_temperature_0_only() -> None:
    drawing = Workbench(session(toys.cycle()), Inputs(), BenchConfig(temperature=1.0))
    names, notes = built(drawing, "plain", "transformers", "prompt-lookup")
    assert names == ["plain"]
    assert notes.count("temperature 0") == 2


def test_heads_of_another_kind_are_refused(tmp_path: Path) -> None:
    target = toys.cycle()
    folder = save_for(random_heads(target, "hydra"), target, tmp_path / "heads")
    workbench = Workbench(session(target), Inputs(), BenchConfig(medusa_heads=str(folder)))
    with pytest.raises(HeadsError, match="hydra heads; expected Medusa heads"):
        build(["medusa-default"], workbench)


# Peers.


def counted(start: int, n_tokens: int) -> list[int]:
    return [(start + 1 + n) % 64 for n in range(n_tokens)]


@pytest.mark.parametrize("engine", ["transformers", "lean"])
def test_a_peer_decodes_with_the_same_weights(tmp_path: Path, engine: str) -> None:
    model = toys.save_cycle(tmp_path / "model")
    target = load_target(model, engine=engine)
    assert (target.model is None) == (engine == "lean")
    written = Peers(target, str(model)).generate([3, 4, 5], 20)
    assert written.tokens == counted(5, 20)
    assert (written.steps, written.passes) == (20, 19)
    assert written.prefill_seconds > 0
    assert written.decode_seconds > 0


def test_a_peer_writes_as_many_tokens_as_plain_decoding_though_the_last_is_an_eos(
    tmp_path: Path,
) -> None:
    model = toys.save_cycle(tmp_path / "model", config_eos=9, generation_eos=9, tokenizer_eos=9)
    target = load_target(model)
    plain = Decoder(target, None, [EMPTY]).generate([3], Static(0), 30)
    assert plain.reason == "stop"
    peers = Peers(target, str(model))
    assert peers.generate([3], len(plain.tokens)).tokens == plain.tokens
    assert peers.generate([3], 30).tokens == counted(3, 30)


def test_prompt_lookup_writes_the_same_in_fewer_passes() -> None:
    prompt = [*range(64), 0, 1]
    written = Peers(toys.cycle(), None).generate(prompt, 30, prompt_lookup_num_tokens=10)
    assert written.tokens == counted(1, 30)
    assert written.steps == 3  # 10 drafted tokens and one more each
    assert written.passes == 2


def test_settings_in_the_checkpoint_change_no_peers_text(tmp_path: Path) -> None:
    model = toys.save_cycle(tmp_path / "model")
    file = model / "generation_config.json"
    settings = {"do_sample": True, "temperature": 9.0, "repetition_penalty": 50.0}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    target = load_target(model)
    assert Peers(target, str(model)).generate(list(range(64)), 12).tokens == counted(63, 12)
    assert target.model.generation_config.repetition_penalty == 50.0


def test_a_pad_token_in_the_prompt_is_read_like_any_other(tmp_path: Path) -> None:
    target = toys.rand()
    plain = Decoder(target, None, [EMPTY]).generate([0, 4, 0, 0, 7], Static(0), 16)
    assert Peers(target, None).generate([0, 4, 0, 0, 7], 16).tokens == plain.tokens

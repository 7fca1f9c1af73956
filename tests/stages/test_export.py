"""Export: every form of a recorded run reads back, and stated losses are those of replay."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_run import PROMPTS, save_costs, save_run, text_trace, timing_rows

from entmtp_calib.bank import Bank
from entmtp_calib.errors import ArtifactError, DataError, TreeError, UsageError
from entmtp_calib.formats.chains import SglangNumbers
from entmtp_calib.formats.engines import FORMS
from entmtp_calib.formats.fit import closest_numbers, fixed
from entmtp_calib.formats.reading import read
from entmtp_calib.policy import Static
from entmtp_calib.stages.export import export
from entmtp_calib.stages.recorded import Recorded
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, Tree, chain

BUSHY = Tree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
TREES = [EMPTY, chain(1), BUSHY, chain(3)]
WHOLE = ("medusa", "trtllm", "trtllm-bench", "vllm-tree", "eagle", "sequoia", "modelopt")
REPLAYED = ("vllm-schedule", "sglang", "sglang-adaptive", "modelopt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "[/run]"
    policies = {"static": Static(2), "other": Static(1)}
    return save_run(folder, text_trace(), TREES, policies, timing_rows(0.4, level_ms=0.2))


def trace(*splits: str) -> Trace:
    return text_trace().select([n for split in splits for n in PROMPTS[split]])


@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize(("name", "tree"), [(None, BUSHY), ("chain-3", chain(3)), ("1", chain(1))])
def test_a_tree_comes_back_from_every_form_that_holds_one(
    form: str, name: str | None, tree: Tree, folder: Path
) -> None:
    exported = export(folder, form, name)
    (listed,) = read(exported.content, "file")
    assert listed.tree == tree
    assert f"tree {tree.id}: {tree.n_nodes} nodes, depth {tree.depth}" in exported.notes


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_who_reads_it_and_what_it_cannot_express(form: str, folder: Path) -> None:
    notes = export(folder, form).notes
    assert notes[:2] == (
        f"read by {FORMS[form].engine}: {FORMS[form].versions}",
        f"cannot express {FORMS[form].cannot}",
    )
    other = "measured with hydra heads; "  # unless the engine drafts with these too
    assert any(note.startswith(other) for note in notes) == (form not in ("medusa", "modelopt"))


def test_sglangs_numbers_are_the_closest_ones_and_their_loss_is_stated(folder: Path) -> None:
    exported = export(folder, "sglang")
    costs = Recorded.open(folder).costs()
    fit = closest_numbers(BUSHY, trace("search", "select"), costs)
    assert SglangNumbers.parse(exported.content.decode()) == fit.numbers
    now = fit.on(trace("report"))
    own = fixed(trace("report"), BUSHY, float(costs.step_ms([BUSHY])[0]))
    assert (
        f"closest fit: predicted {now.mean_emitted:.3f} emitted tokens per step instead of "
        f"{own.mean_emitted:.3f} ({100 * (now.mean_emitted / own.mean_emitted - 1):+.1f} %) and "
        f"{now.tokens_per_second:.2f} tokens/s instead of {own.tokens_per_second:.2f} "
        f"({100 * (now.tokens_per_second / own.tokens_per_second - 1):+.1f} %) of {BUSHY.id}, "
        "by replay of the report split (3 prompts) under timing.parquet"
    ) in exported.notes


def test_a_chain_is_sglangs_own_shape_and_loses_nothing(folder: Path) -> None:
    exported = export(folder, "sglang", "chain-1")
    assert read(exported.content, "file")[0].tree == chain(1)
    assert any("(+0.0 %) and" in note and "(+0.0 %) of chain-1" in note for note in exported.notes)


def test_eagle_2_and_3_get_the_same_numbers_in_a_note(folder: Path) -> None:
    numbers = SglangNumbers.parse(export(folder, "sglang").content.decode())
    assert numbers
    written = ", ".join(f"{name}={value}" for name, value in numbers.eagle.items())
    notes = export(folder, "eagle").notes
    assert any(note.startswith(f"EAGLE-2 and 3: {written}: predicted") for note in notes)


def test_other_costs_give_other_numbers(folder: Path, tmp_path: Path) -> None:
    dear = save_costs(tmp_path / "dear.parquet", timing_rows(row_ms=30.0))
    exported = export(folder, "sglang", costs=dear)
    assert exported.content == b"--speculative-num-steps 1 --speculative-eagle-topk 1 " + (
        b"--speculative-num-draft-tokens 2\n"
    )
    assert any(f"under {dear}" in note for note in exported.notes)


def test_a_bank_becomes_the_chains_of_its_depths_and_a_tree_its_own(folder: Path) -> None:
    document = json.loads(export(folder, "sglang-adaptive").content)
    assert document["candidate_steps"] == [1, 3]
    exported = export(folder, "sglang-adaptive", "chain-1")
    assert json.loads(exported.content)["candidate_steps"] == [1]
    assert any("--speculative-num-steps 1 " in note for note in exported.notes)


def test_a_schedule_is_no_deeper_than_its_trees_and_its_profile_is_that_of_its_first_chain(
    folder: Path,
) -> None:
    exported = export(folder, "vllm-schedule")
    ranges = json.loads(exported.content)["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1
    assert max(depth for *_, depth in ranges) <= 3
    (test,) = (note for note in exported.notes if note.startswith("for load tests"))
    rates = json.loads(test.partition(": ")[2])["synthetic_acceptance_rates"]
    assert len(rates) == ranges[0][2]
    only = json.loads(export(folder, "vllm-schedule", "chain-1").content)
    assert only["num_speculative_tokens"] == 1


def test_a_schedule_in_which_nothing_pays_is_refused(folder: Path, tmp_path: Path) -> None:
    dear = save_costs(tmp_path / "dear.parquet", timing_rows(row_ms=500.0))
    with pytest.raises(DataError, match="no chain to depth 3 pays at any batch size from 1 to 16"):
        export(folder, "vllm-schedule", costs=dear)


def test_trtllm_bench_carries_its_notes_as_comments(folder: Path) -> None:
    exported = export(folder, "trtllm-bench")
    lines = exported.content.decode().splitlines()
    assert lines[: len(exported.notes)] == [f"# {note}" for note in exported.notes]
    assert lines[len(exported.notes)] == "- [0]"


def test_a_profile_says_what_it_was_measured_on(folder: Path) -> None:
    document = json.loads(export(folder, "modelopt").content)
    assert (document["method"], document["target_model"]) == ("hydra", {"name": "toy"})
    conditions = document["measurement_conditions"]
    assert (conditions["dataset"], conditions["split"]) == ("twelve texts", "report")
    histogram = document["acceptance_length_histogram"]
    assert conditions["passes"] == sum(histogram.values())


@pytest.mark.parametrize(
    ("paths", "form", "words"),
    [
        ([[0], [1], [1, 0]], "medusa", r"Hydra drafts wrong tokens under \[1\]"),
        ([[0], [1], [0, 0]], "vllm-tree", "not all nodes above depth 2 have as many children"),
        ([[0], [2]], "trtllm", "drafts every rank up to 2 at depth 1"),
    ],
)
def test_what_an_engine_would_draft_otherwise_is_said(
    paths: list[list[int]], form: str, words: str, tmp_path: Path
) -> None:
    trees = [EMPTY, Tree.of(paths), chain(2)]
    run = save_run(tmp_path / "run", text_trace(), trees, {"static": Static(1)}, timing_rows(1.0))
    assert any(re.search(words, note) for note in export(run, form).notes)
    assert not any(re.search(words, note) for note in export(run, form, "chain-2").notes)


def test_a_bank_that_chooses_by_a_policy_says_that_the_file_holds_one_tree(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bank.safetensors"
    replace(Bank.load(folder), auto="other").save(file)
    words = "the bank's choice is its policy other"
    assert any(note.startswith(words) for note in export(file, "medusa").notes)
    assert not any(note.startswith(words) for note in export(folder, "medusa").notes)


@pytest.mark.parametrize("form", FORMS)
def test_a_bank_file_alone_is_enough_for_what_needs_no_replay(
    form: str, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bank.safetensors"
    file.write_bytes((folder / "bank.safetensors").read_bytes())
    if form in REPLAYED:
        with pytest.raises(ArtifactError, match=f"lies in no run folder, and {form} is found by"):
            export(file, form)
    elif form != "trtllm-bench":  # its notes stand in it
        assert export(file, form).content == export(folder, form).content


def test_plain_decoding_an_unknown_tree_and_an_unknown_form_are_refused(folder: Path) -> None:
    with pytest.raises(TreeError, match="tree plain drafts nothing"):
        export(folder, "medusa", "plain")
    with pytest.raises(TreeError, match="the bank has no tree 'oak'"):
        export(folder, "medusa", "oak")
    with pytest.raises(UsageError, match="--format gguf; expected one of medusa, trtllm"):
        export(folder, "gguf")

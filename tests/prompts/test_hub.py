"""The hub: used when cached or in reach, and never waited for."""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from entmtp_calib.errors import DataError
from entmtp_calib.prompts import hub, load_prompts, sources

ROWS = [{"question": "from the hub", "answer": "#### 1"}]


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "bundled", "answer": ""}))
    monkeypatch.setattr(sources, "DATA_FOLDER", tmp_path)


def fill_cache(home: Path, owner_name: str, config: str, splits: dict[str, list[Any]]) -> None:
    """What the `datasets` library leaves behind after a download."""
    import datasets

    copy = home / "datasets" / owner_name / config / "0.0.0" / "abc"
    copy.mkdir(parents=True)
    (copy / "dataset_info.json").write_text("{}")
    stem = owner_name.split("___")[1]
    for split, rows in splits.items():
        saved = home / f"saved-{split}"
        datasets.Dataset.from_list(rows).save_to_disk(str(saved))
        next(saved.glob("*.arrow")).rename(copy / f"{stem}-{split}.arrow")


@pytest.mark.usefixtures("bundled")
def test_offline_the_bundled_prompts_are_used_and_the_reason_is_kept() -> None:
    found = load_prompts("gsm8k")
    assert found.source == "bundled"
    assert "openai/gsm8k: HF_HUB_OFFLINE is set" in found.describe()
    assert "openai/gsm8k: offline" in load_prompts("gsm8k", offline=True).describe()


@pytest.mark.usefixtures("bundled")
def test_a_cached_set_is_used_without_a_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    other = [{"question": "train", "answer": ""}]
    fill_cache(tmp_path, "openai___gsm8k", "main", {"test": ROWS, "train": other})
    for found in (load_prompts("gsm8k"), load_prompts("gsm8k", "openai/gsm8k", offline=True)):
        assert found.source == "hub openai/gsm8k test"
        assert [p.messages[0][1] for p in found.prompts] == ["from the hub"]


def test_a_cached_set_of_any_owner_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    fill_cache(tmp_path, "me___my_set", "default", {"train": [{"prompt": "mine"}]})
    assert load_prompts("custom", "me/MySet").prompts[0].messages == (("user", "mine"),)


def test_a_hub_id_offline_is_a_quick_one_line_answer() -> None:
    for name in ("openai/gsm8k", "gsm8k"):
        with pytest.raises(DataError, match=r"openai/gsm8k .* HF_HUB_OFFLINE is set") as caught:
            load_prompts("gsm8k", name)
        assert "\n" not in str(caught.value)


def test_a_hub_that_accepts_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        assert hub.unreachable(hub.PRESETS["gsm8k"])
        assert time.monotonic() - start < 3


def test_a_hub_that_refuses_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for endpoint in (f"http://127.0.0.1:{port}", "not a url"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert "cannot be reached" in hub.unreachable(hub.PRESETS["gsm8k"])


def test_late_work_is_left_behind() -> None:
    start = time.monotonic()
    with pytest.raises(multiprocessing.TimeoutError):
        hub.within(0.1, lambda: time.sleep(1.5))
    assert time.monotonic() - start < 1
    assert hub.within(5, lambda: 3) == hub.within(None, lambda: 3) == 3


@pytest.mark.usefixtures("bundled")
def test_a_hub_in_reach_is_asked_with_the_right_config(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.append((*args, options["split"], options["streaming"]))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(hub, "unreachable", lambda _: "")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_prompts("gsm8k").source == "hub openai/gsm8k test"
    assert load_prompts("gsm8k", "gsm8k").source == "hub openai/gsm8k test"
    assert asked == [("openai/gsm8k", "main", "test", False)] * 2


@pytest.mark.usefixtures("bundled")
def test_a_download_that_fails_falls_back_only_where_nothing_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    def load_dataset(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Dataset scripts are no longer supported")

    monkeypatch.setattr(hub, "unreachable", lambda _: "")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load_prompts("gsm8k")
    assert found.source == "bundled"
    assert "scripts are no longer supported" in found.note
    with pytest.raises(DataError, match="pass the file with --data"):
        load_prompts("gsm8k", "openai/gsm8k")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("openai/gsm8k", True),
        ("me/my-set_2.1", True),
        ("data/d.jsonl", False),
        ("data/d.json.gz", False),
        ("d", False),
        ("/abs/path", False),
        ("a/b/c", False),
        ("../x", False),
    ],
)
def test_only_owner_and_name_is_taken_for_a_hub_id(name: str, known: bool) -> None:
    assert (hub.hub_set(name) is not None) is known

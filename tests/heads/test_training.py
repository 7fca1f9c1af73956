"""Features and training: what is learned from is right, learning works, and it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import toys

from entmtp_calib.config import TrainConfig
from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.features import FeatureSet, Text, write_features
from entmtp_calib.heads.training import (
    Loss,
    Trainer,
    batches,
    collate,
    draft_vocabulary,
    new_heads,
)
from entmtp_calib.heads.validation import validate
from entmtp_calib.policy import Static
from entmtp_calib.progress import Silent
from entmtp_calib.stages.train_heads import without_repeats
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.tree import chain

SMALL = TrainConfig(
    n_heads=2, prefix_width=8, draft_vocab=0, epochs=3, batch_tokens=60, lr=0.02, held_out=4
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(toys.save_cycle(tmp_path_factory.mktemp("cycle")), engine="transformers")


@pytest.fixture(scope="module")
def features(target: Target, tmp_path_factory: pytest.TempPathFactory) -> FeatureSet:
    texts = []
    for start in range(0, 64, 2):
        ids = [(start + i) % 64 for i in range(12 + start % 5)]
        texts.append(Text("even" if start % 4 else "odd", tuple(ids[:3]), tuple(ids[3:])))
    return FeatureSet(write_features(target, texts, tmp_path_factory.mktemp("f"), Silent()))


def test_features_are_the_targets_own(target: Target, features: FeatureSet) -> None:
    for i in (0, 13, 31):
        example = features[i]
        ids = example.tokens.tolist()
        hidden = target.forward(ids, list(range(len(ids))), target.new_cache(len(ids)))
        torch.testing.assert_close(example.hidden.float(), hidden, atol=2e-3, rtol=2e-3)
        probs, best = target.logits(hidden).softmax(-1).max(-1)
        after = slice(example.prompt_length - 1, None)
        assert torch.equal(example.soft_ids[after, 0].long(), best[after])
        torch.testing.assert_close(
            example.soft_probs[after, 0].float(), probs[after], atol=1e-3, rtol=1e-3
        )
        assert not example.soft_probs[: example.prompt_length - 1].any()


def test_existing_shards_are_kept_and_other_texts_get_others(
    target: Target, tmp_path: Path
) -> None:
    text = Text("a", (1, 2), (3, 4, 5, 6))
    [path] = write_features(target, [text], tmp_path, Silent())
    before = path.stat().st_mtime_ns
    assert write_features(target, [text], tmp_path, Silent()) == [path]
    assert path.stat().st_mtime_ns == before
    other = Text("a", (1, 2), (3, 4, 5, 7))
    assert write_features(target, [other], tmp_path, Silent()) != [path]


def test_every_text_is_in_one_batch(features: FeatureSet) -> None:
    groups = batches(features, range(len(features)), 60, seed=1)
    assert sorted(i for group in groups for i in group) == list(range(len(features)))
    assert groups != batches(features, range(len(features)), 60, seed=2)


def test_the_draft_vocabulary_is_the_most_frequent_tokens(features: FeatureSet) -> None:
    counts = torch.zeros(64, dtype=torch.long)
    for i in range(len(features)):
        example = features[i]
        counts.index_add_(
            0,
            example.tokens[example.prompt_length :].long(),
            torch.ones(len(example.tokens) - example.prompt_length, dtype=torch.long),
        )
    chosen = draft_vocabulary(features, range(len(features)), 5)
    assert chosen is not None
    assert sorted(counts[chosen].tolist()) == counts.sort().values[-5:].tolist()
    assert draft_vocabulary(features, range(len(features)), 0) is None


@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_trained_heads_draft_what_the_target_writes(
    kind: str, target: Target, features: FeatureSet, tmp_path: Path
) -> None:
    settings = {**SMALL.to_dict(), "kind": kind, "epochs": 12}
    if kind == "medusa":
        settings |= {"prefix_width": 0, "own_projection": True}
    config = TrainConfig.from_dict(settings)
    heads = new_heads(config, target, None)
    training = [i for i in range(len(features)) if i % 8]
    held_out = [i for i in range(len(features)) if not i % 8]
    trainer = Trainer(heads, config, features, training, tmp_path / "c.pt")
    history = trainer.run(lambda h: validate(h, features, range(len(features))), Silent())
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert len(held_out) == 4
    generated = Decoder(target, heads, [chain(2)]).generate([10, 11], Static(0), 30)
    assert sum(s.accepted_draft_tokens for s in generated.steps) / len(generated.steps) > 1.5


def test_a_stopped_training_ends_with_the_same_weights(
    target: Target, features: FeatureSet, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    class StopAfter(Silent):
        def __init__(self, steps: int) -> None:
            self.left = steps

        def advance(self, n: int = 1, note: str = "") -> None:
            self.left -= n
            if self.left < 0:
                raise Stop

    config = TrainConfig.from_dict({**SMALL.to_dict(), "checkpoint_seconds": 0.0})
    indices = range(len(features))

    def trainer(path: Path) -> Trainer:
        return Trainer(new_heads(config, target, None), config, features, indices, path)

    whole = trainer(tmp_path / "whole")
    history = whole.run(lambda h: {}, Silent())
    with pytest.raises(Stop):
        trainer(tmp_path / "parts").run(lambda h: {}, StopAfter(7))
    resumed = trainer(tmp_path / "parts")
    assert len(resumed.run(lambda h: {}, Silent())) == len(history) == 3
    for name, value in whole.heads.state_dict().items():
        assert torch.equal(resumed.heads.state_dict()[name], value), name


def test_a_checkpoint_of_other_texts_is_refused(
    target: Target, features: FeatureSet, tmp_path: Path
) -> None:
    config = TrainConfig.from_dict({**SMALL.to_dict(), "epochs": 1})
    first, other = (
        Trainer(new_heads(config, target, None), config, features, texts, tmp_path / "c.pt")
        for texts in (range(8), range(8, 16))
    )
    first.run(lambda h: {}, Silent())
    with pytest.raises(HeadsError, match="other settings or texts"):
        other.run(lambda h: {}, Silent())


def test_a_checkpoint_of_other_settings_is_refused(
    target: Target, features: FeatureSet, tmp_path: Path
) -> None:
    for lr in (0.02, 0.01):
        config = TrainConfig.from_dict({**SMALL.to_dict(), "lr": lr, "epochs": 1})
        path = tmp_path / "c.pt"
        trainer = Trainer(new_heads(config, target, None), config, features, range(8), path)
        if lr == 0.02:
            trainer.run(lambda h: {}, Silent())
        else:
            with pytest.raises(HeadsError, match="other settings"):
                trainer.run(lambda h: {}, Silent())


def test_a_batch_of_short_texts_has_a_finite_loss(target: Target, tmp_path: Path) -> None:
    texts = [Text("a", (1, 2), (3, 4))] * 2
    short = FeatureSet(write_features(target, texts, tmp_path, Silent()))
    heads = new_heads(TrainConfig.from_dict({**SMALL.to_dict(), "n_heads": 4}), target, None)
    loss = Loss(heads, SMALL)(collate(short, range(2), heads.device))
    assert torch.isfinite(loss)


def test_heads_of_a_half_precision_target_learn(tmp_path: Path) -> None:
    half = load_target(toys.save_cycle(tmp_path), dtype="bfloat16", engine="transformers")
    texts = [Text("a", (n, n + 1, n + 2), tuple(range(n + 3, n + 12))) for n in range(16)]
    features = FeatureSet(write_features(half, texts, tmp_path / "f", Silent()))
    config = TrainConfig.from_dict({**SMALL.to_dict(), "epochs": 1})
    trainer = Trainer(new_heads(config, half, None), config, features, range(16), tmp_path / "c.pt")
    [record] = trainer.run(lambda h: validate(h, features, range(16)), Silent())
    assert record["loss"] > 0
    assert trainer.heads.dtype == torch.float32


def test_a_text_that_comes_twice_is_used_once() -> None:
    first, again, other = Text("a", (1,), (2,)), Text("b", (1,), (3,)), Text("b", (2,), (3,))
    assert without_repeats([first, again, other]) == [first, other]

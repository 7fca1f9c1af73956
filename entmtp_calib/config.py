"""Every default, unit and check of the settings a user can choose, once.

Frozen dataclasses; a value that can never work raises `UsageError` naming its flag. What a run
resolved is stored with it (`to_dict`), and a round trip gives the same object back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from entmtp_calib.errors import UsageError

T = TypeVar("T", bound="Settings")

DEFAULT_HEADS_NAME = "smollm2-135m-instruct-hydra"
"""The folder in artifacts/heads that the embedded default model drafts with."""

TASKS = ("gsm8k", "humaneval", "sharegpt", "custom")
PROMPT_MODES = ("auto", "chat", "raw", "alpaca", "chatml", "vicuna")
"""The last ones are templates by name, for models that come without one of their own."""


class Settings:
    """Plain-value round trip, and checks that name the flag."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls: type[T], values: dict[str, Any]) -> T:
        """Inverse of `to_dict`; unknown names are a `UsageError`."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(values.keys() - known)
        if unknown:
            raise UsageError(f"unknown settings {unknown}", f"some of {sorted(known)}")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def _check(self, name: str, fits: Callable[[Any], bool], expected: str) -> None:
        value = getattr(self, name)
        if not fits(value):
            raise UsageError(f"--{name.replace('_', '-')} {value}", expected)


def _finite(value: float) -> bool:
    return math.isfinite(value)


@dataclass(frozen=True)
class SamplingConfig(Settings):
    """How the target chooses a token.

    Temperature 0 is greedy. Otherwise a draw from the distribution after temperature, then top-k
    (0 = off), then top-p (1 = off), with noise that depends only on (seed, absolute position).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self._check("temperature", lambda v: _finite(v) and v >= 0, "a finite number of at least 0")
        self._check("top_p", lambda v: 0 < v <= 1, "a number above 0 and at most 1")
        self._check("top_k", lambda v: v >= 0, "a whole number of at least 0 (0 turns it off)")
        self._check("seed", lambda v: 0 <= v < 2**63, "a whole number from 0 to 2^63 - 1")


@dataclass(frozen=True)
class AcceptanceConfig(Settings):
    """When a drafted token is kept: where it is the target's choice, or where it is typical.

    Exact acceptance is lossless. Typical acceptance is not: a token is kept where its probability
    is above min(epsilon, alpha * exp(-entropy in nats)) (Cai et al. 2024, Medusa).
    """

    rule: str = "exact"
    """exact or typical."""
    epsilon: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        if self.rule not in ("exact", "typical"):
            raise UsageError(f"--acceptance {self.rule}", "exact or typical")
        for name in ("epsilon", "alpha"):
            self._check(name, lambda v: _finite(v) and v >= 0, "a finite number of at least 0")

    @classmethod
    def of(
        cls, rule: str, epsilon: float | None = None, alpha: float | None = None
    ) -> AcceptanceConfig:
        """From flags that may not be given; `UsageError` for one that would change nothing."""
        given = {n: v for n, v in (("epsilon", epsilon), ("alpha", alpha)) if v is not None}
        if given and rule == "exact":
            flags = ", ".join(f"--{name} {value}" for name, value in given.items())
            raise UsageError(f"{flags} with --acceptance exact", "--acceptance typical")
        return cls(rule, **given)

    @property
    def is_exact(self) -> bool:
        """Whether the text is plain decoding's."""
        return self.rule == "exact"

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise `UsageError` where the rule has no meaning."""
        if not self.is_exact and sampling.temperature == 0:
            raise UsageError(
                "--acceptance typical with --temperature 0",
                "--temperature above 0: greedy decoding finds one token typical, the best",
            )


@dataclass(frozen=True)
class BuildConfig(Settings):
    """The settings of `build-bank`; see `PRESETS` for the sizes that go together."""

    task: str = "gsm8k"
    search_prompts: int = 20
    select_prompts: int = 5
    report_prompts: int = 5
    max_new_tokens: int = 96
    max_prompt_tokens: int = 1400
    max_nodes: int = 64
    max_depth: int = 0
    """0 means as deep as the heads go."""
    max_rank: int = 16
    """Child ranks a tree may use; at most the trace's rank cap."""
    max_candidates: int = 5
    """Grown trees that are run live; 0 means the whole acceptance frontier."""
    timing_rounds: int = 1
    step_repetitions: int = 9
    context_lengths: tuple[int, ...] = (128, 256, 512)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    prompt_mode: str = "auto"
    signal: str = "auto"
    """What ladder and hysteresis look at, such as chain_value:1; auto tries several."""
    seed: int = 0

    def __post_init__(self) -> None:
        self._check("task", lambda v: v in TASKS, f"one of {', '.join(TASKS)}")
        for name in ("search_prompts", "select_prompts", "report_prompts", "timing_rounds"):
            self._check(name, lambda v: v >= 1, "a whole number of at least 1")
        self._check("max_new_tokens", lambda v: v >= 2, "a whole number of at least 2")
        self._check("max_prompt_tokens", lambda v: v >= 1, "a whole number of at least 1")
        self._check("max_nodes", lambda v: v >= 1, "a whole number of at least 1")
        self._check("max_depth", lambda v: v >= 0, "a whole number of at least 0")
        self._check("max_rank", lambda v: 1 <= v <= 32, "a whole number from 1 to 32")
        self._check("max_candidates", lambda v: v >= 0, "a whole number of at least 0")
        self._check("step_repetitions", lambda v: v >= 3, "a whole number of at least 3")
        self._check("context_lengths", lambda v: v and min(v) >= 1, "lengths of at least 1")
        modes = f"one of {', '.join(PROMPT_MODES)}"
        self._check("prompt_mode", lambda v: v in PROMPT_MODES, modes)
        _ = self.sampling

    @property
    def sampling(self) -> SamplingConfig:
        """How the target chooses during calibration."""
        return SamplingConfig(self.temperature, self.top_p, self.top_k, self.seed)


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "search_prompts": 8,
        "select_prompts": 3,
        "report_prompts": 2,
        "max_new_tokens": 48,
        "max_candidates": 3,
        "timing_rounds": 1,
        "step_repetitions": 5,
        "context_lengths": (192,),
    },
    "default": {},
    "paper": {
        "search_prompts": 100,
        "select_prompts": 50,
        "report_prompts": 50,
        "max_new_tokens": 256,
        "max_candidates": 0,
        "timing_rounds": 5,
        "step_repetitions": 30,
        "context_lengths": (128, 256, 512, 1024),
    },
}
"""quick and default are sized for the embedded model on two cores; paper is the paper's."""


def build_config(preset: str, **changes: Any) -> BuildConfig:
    """A preset with some values changed (None keeps the preset's)."""
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset}", f"one of {', '.join(PRESETS)}")
    chosen = {name: value for name, value in changes.items() if value is not None}
    return BuildConfig(**{**PRESETS[preset], **chosen})


@dataclass(frozen=True)
class TrainConfig(Settings):
    """The settings of `train-heads`. The defaults are those of the embedded model's Hydra heads."""

    kind: str = "hydra"
    n_heads: int = 4
    n_layers: int = 1
    prefix_width: int = 512
    """Inner width of the prefix layer's MLP; 0 means no prefix layer."""
    own_projection: bool = False
    draft_vocab: int = 6144
    """Tokens that can be drafted, the most frequent ones; 0 means all."""
    epochs: int = 4
    batch_tokens: int = 3072
    """Padded tokens a batch, prompts included."""
    lr: float = 1.5e-3
    final_lr: float = 0.02
    """Last learning rate as a share of the first."""
    warmup: float = 0.03
    """Share of the steps."""
    weight_decay: float = 0.05
    dropout: float = 0.0
    soft_weight: float = 0.5
    """Share of the target's distribution in the label; the rest is the token it wrote."""
    held_out: int = 60
    """Texts kept for validation, from all sources alike."""
    checkpoint_seconds: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._check("kind", lambda v: v in ("hydra", "medusa"), "hydra or medusa")
        for name in ("n_heads", "n_layers", "epochs", "held_out"):
            self._check(name, lambda v: v >= 1, "a whole number of at least 1")
        for name in ("prefix_width", "draft_vocab"):
            self._check(name, lambda v: v >= 0, "a whole number of at least 0")
        self._check("lr", lambda v: _finite(v) and v > 0, "a finite number above 0")
        self._check("batch_tokens", lambda v: v >= 1, "a whole number of at least 1")
        self._check("seed", lambda v: 0 <= v < 2**32, "a whole number from 0 to 2^32 - 1")
        for name in ("weight_decay", "checkpoint_seconds"):
            self._check(name, lambda v: _finite(v) and v >= 0, "a finite number of at least 0")
        for name in ("final_lr", "warmup", "dropout", "soft_weight"):
            self._check(name, lambda v: 0 <= v <= 1, "a number from 0 to 1")
        if self.kind == "medusa" and self.prefix_width:
            raise UsageError(
                f"--prefix-width {self.prefix_width} with --kind medusa",
                "no prefix layer: Medusa heads have none",
                "pass --prefix-width 0",
            )


@dataclass(frozen=True)
class DecodeConfig(Settings):
    """The settings of one generation."""

    max_new_tokens: int = 128
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        self._check("max_new_tokens", lambda v: v >= 1, "a whole number of at least 1")
        self.acceptance.check_sampling(self.sampling)


@dataclass(frozen=True)
class BenchConfig(Settings):
    """The settings of `bench`; None stands for what is usual for the bank."""

    methods: tuple[str, ...] | None = None
    task: str | None = None
    data: str | None = None
    medusa_heads: str | None = None
    prompts: int | None = None
    rounds: int = 1
    """Times that each text is timed with each method."""
    max_new_tokens: int = 96
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        self._check("prompts", lambda v: v is None or v >= 1, "a whole number of at least 1")
        for name in ("rounds", "max_new_tokens"):
            self._check(name, lambda v: v >= 1, "a whole number of at least 1")
        self.acceptance.check_sampling(self.sampling)

    @property
    def sampling(self) -> SamplingConfig:
        """How the target chooses."""
        return SamplingConfig(self.temperature, self.top_p, self.top_k, self.seed)

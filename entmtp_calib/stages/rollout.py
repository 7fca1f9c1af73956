"""Rollout: the target writes its text to every prompt, and the trace records how heads rank it.

Since decoding is lossless, the text is the same whatever tree drafts it; a short chain is used for
speed. Prompt by prompt: an interrupted rollout goes on with the prompt it was at.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from entmtp_calib import records
from entmtp_calib.decoding import Decoder
from entmtp_calib.heads.model import Heads
from entmtp_calib.heads.ranking import following_tokens, greedy_chain, true_ranks
from entmtp_calib.policy import Static
from entmtp_calib.sampling import entropy, top1_probability
from entmtp_calib.stages.recorded import TRACE
from entmtp_calib.stages.setup import Run
from entmtp_calib.trace import Trace
from entmtp_calib.tree import chain

STAGE = "rollout"
DRAFT_DEPTH = 2


def rollout(run: Run) -> None:
    """Write `trace.parquet`, a row per generated position of every split."""
    inputs = run.text_inputs
    if run.folder.is_done(STAGE, inputs):
        return
    parts = run.folder.partial(STAGE, inputs)
    known = set(parts.tables())
    jobs = [(name, prompt) for name, prompts in run.splits.items() for prompt in prompts]
    tree = chain(min(DRAFT_DEPTH, run.heads.n_heads))
    decoder = Decoder(run.target, run.heads, [tree], run.config.sampling)
    run.progress.start("rollout", len(jobs))
    run.progress.advance(len(known))
    for number, (name, prompt) in enumerate(jobs):
        if number not in known:
            trace = trace_prompt(decoder, prompt.ids, run.config.max_new_tokens, number)
            parts.write_table(number, trace.to_table(name))
            run.progress.advance(1, f"{len(trace)} tokens")
    tables = [parts.read_table(number, records.TRACE_SCHEMA) for number in range(len(jobs))]
    run.folder.write_table(TRACE, pa.concat_tables(tables))
    run.folder.mark_done(STAGE, inputs, [TRACE])
    run.progress.done()


def read_trace(run: Run, split: str) -> Trace:
    """The trace of one split."""
    return Trace.from_table(run.folder.read_table(TRACE, records.TRACE_SCHEMA), split)


def trace_prompt(
    decoder: Decoder, prompt_ids: tuple[int, ...], max_new_tokens: int, number: int
) -> Trace:
    """Generate one text and record it as rows of prompt `number`."""
    recorder = _Recorder()
    generated = decoder.generate(prompt_ids, Static(0), max_new_tokens, observer=recorder)
    heads = decoder.heads
    assert heads is not None  # rollouts always have heads
    n = len(generated.tokens)
    vectors = torch.cat(recorder.vectors)[:n]
    text = torch.tensor(generated.tokens, device=vectors.device)
    _, probs = greedy_chain(heads, vectors, text)
    return Trace(
        prompt=np.full(n, number, dtype=np.int32),
        position=np.arange(n, dtype=np.int32),
        context=np.arange(n, dtype=np.int32) + len(prompt_ids),
        token=text.cpu().numpy().astype(np.int32),
        ranks=_ranks(heads, vectors, text),
        chain_probs=probs.cpu().numpy(),
        base_top1=np.array(recorder.top1[:n], dtype=np.float32),
        entropy=np.array(recorder.entropy[:n], dtype=np.float32),
    )


def _ranks(heads: Heads, vectors: Tensor, text: Tensor) -> np.ndarray:
    return true_ranks(heads, vectors, following_tokens(text, heads.n_heads)).numpy()


class _Recorder:
    """Keeps, per row that chose a token, the heads' vector and the target's certainty."""

    def __init__(self) -> None:
        self.vectors: list[Tensor] = []
        self.top1: list[float] = []
        self.entropy: list[float] = []

    def __call__(self, vectors: Tensor, logits: Tensor) -> None:
        self.vectors.append(vectors)
        self.top1 += map(top1_probability, logits)
        self.entropy += map(entropy, logits)

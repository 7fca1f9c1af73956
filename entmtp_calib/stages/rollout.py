"""Rollout: the target writes its text to every prompt, and the trace records how heads rank it.

Since decoding is lossless, the text is the same whatever tree drafts it: many texts are written at
once without one, and heads then look at each whole text. A text that is recorded is kept, so an
interrupted rollout loses only the texts that it was at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch

from entmtp_calib import records
from entmtp_calib.config import SamplingConfig
from entmtp_calib.heads.model import Heads, HeadState
from entmtp_calib.heads.ranking import following_tokens, ranks_and_chain
from entmtp_calib.stages.recorded import TRACE
from entmtp_calib.stages.setup import Run
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.texts import PlainText, plain_texts
from entmtp_calib.trace import Trace

STAGE = "rollout"


def rollout(run: Run) -> None:
    """Write `trace.parquet`, a row per generated position of every split."""
    inputs = run.text_inputs
    if run.folder.is_done(STAGE, inputs):
        return
    parts = run.folder.partial(STAGE, inputs)
    known = set(parts.tables())
    jobs = [(name, prompt) for name, prompts in run.splits.items() for prompt in prompts]
    left = {n: prompt.ids for n, (_, prompt) in enumerate(jobs) if n not in known}
    limit = run.config.max_new_tokens
    run.progress.start("rollout", len(jobs) * limit)  # tokens, as if no text ended early
    run.progress.advance(len(known) * limit)
    settings = run.config.sampling
    for number, trace in traces(run.target, run.heads, left, limit, settings, run.progress.advance):
        parts.write_table(number, trace.to_table(jobs[number][0]))
        known.add(number)
        run.progress.advance(limit - len(trace), f"{len(known)} of {len(jobs)} texts")
    tables = [parts.read_table(number, records.TRACE_SCHEMA) for number in range(len(jobs))]
    run.folder.write_table(TRACE, pa.concat_tables(tables))
    run.folder.mark_done(STAGE, inputs, [TRACE])
    run.progress.done()


def read_trace(run: Run, split: str) -> Trace:
    """The trace of one split."""
    return Trace.from_table(run.folder.read_table(TRACE, records.TRACE_SCHEMA), split)


def traces(
    target: Target,
    heads: Heads,
    prompts: Mapping[int, Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Trace]]:
    """Generate a text for every prompt and record it, with its number, as soon as it ends.

    Args:
        prompts: token ids by number.
        on_tokens: called with the number of new tokens after each pass.
    """
    numbers = list(prompts)
    ids = list(prompts.values())
    for text in plain_texts(
        target, ids, max_new_tokens, sampling, record=True, on_tokens=on_tokens
    ):
        number = numbers[text.prompt]
        yield number, _trace(heads, text, len(prompts[number]), number)


@torch.inference_mode()
def _trace(heads: Heads, text: PlainText, context: int, number: int) -> Trace:
    """A text behind `context` tokens as the rows of prompt `number`."""
    rows = text.rows
    assert rows is not None  # they were asked for
    n, hidden = len(text.tokens), rows.hidden
    state = HeadState()
    heads.observe(state, hidden, torch.arange(len(hidden), device=hidden.device))
    tokens = torch.tensor(text.tokens, device=hidden.device)
    following = following_tokens(tokens, heads.n_heads)
    ranks, chain_probs = ranks_and_chain(heads, state.vectors[-n:], following)
    top1, nats = rows.certainty.cpu().numpy().T
    return Trace(
        prompt=np.full(n, number, dtype=np.int32),
        position=np.arange(n, dtype=np.int32),
        context=np.arange(n, dtype=np.int32) + context,
        token=np.array(text.tokens, dtype=np.int32),
        ranks=ranks.numpy(),
        chain_probs=chain_probs.cpu().numpy(),
        base_top1=top1,
        entropy=nats,
    )

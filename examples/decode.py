"""Build a bank and decode with it, looking at every step: python examples/decode.py [RUN]

RUN is the folder of a bank that is there already; without it one is built, which takes minutes.
"""

from __future__ import annotations

import sys

import entmtp_calib as entmtp


def build(inputs: entmtp.Inputs, **sizes: object) -> str:
    """A bank for a model and its heads (`Inputs()`: the embedded ones); its run folder."""
    config = entmtp.build_config("quick", **sizes)
    return str(entmtp.build_bank(config, inputs).folder)


def decode(run: str, prompt: str) -> str:
    """A prompt's text, and on the screen how it came about."""
    session = entmtp.open_session(run)
    decoder = session.decoder(entmtp.SamplingConfig(temperature=0.7, seed=1))
    policy = session.policy("auto")
    generation = decoder.generate(session.encode(prompt), policy, max_new_tokens=64)
    for step in generation.steps:
        print(step.position, step.rows, step.accepted_draft_tokens, f"{step.step_ms:.1f} ms")
    print(f"{generation.mean_emitted_tokens:.2f} tokens per step, end: {generation.reason}")
    return session.target.tokenizer.decode(generation.tokens)


if __name__ == "__main__":
    run_folder = sys.argv[1] if len(sys.argv) > 1 else build(entmtp.Inputs(), task="gsm8k")
    print(decode(run_folder, "A pen costs 3 dollars. How much do 7 pens cost?"))

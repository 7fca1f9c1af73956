"""transformers' own call, over a bank: python examples/generate.py MODEL HEADS RUN

MODEL is a folder or a hub id, HEADS those that the bank in the run folder was built with.
"""

from __future__ import annotations

import sys

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import entmtp_calib as entmtp


def generate(model_name: str, heads_name: str, run: str, prompt: str) -> Tensor:
    """Ids [1, n + m] of a prompt and what follows it, which is also printed as it comes."""
    model = AutoModelForCausalLM.from_pretrained(model_name)
    tokenizer = AutoTokenizer.from_pretrained(model_name)

    target = entmtp.wrap_model(model, tokenizer)
    heads = entmtp.load_heads(heads_name, target)
    generator = entmtp.EntmtpGenerator(target, heads, entmtp.Bank.load(run))

    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    ids = generator.generate(**inputs, max_new_tokens=64, streamer=TextStreamer(tokenizer))
    return ids


if __name__ == "__main__":
    generate(sys.argv[1], sys.argv[2], sys.argv[3], "A pen costs 3 dollars.")

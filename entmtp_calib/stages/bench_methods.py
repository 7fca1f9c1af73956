"""The methods of a bench: what each is, and whether it can take part here.

A method is a function from a prompt and a number of tokens to a text. New ones join `METHODS`; the
policies and trees of the bank take part under their own names. It does not know how methods are
timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from entmtp_calib.bank import Bank
from entmtp_calib.config import BenchConfig
from entmtp_calib.decoding import Decoder
from entmtp_calib.dynamic import Dynamic
from entmtp_calib.errors import HeadsError, TreeError, UsageError
from entmtp_calib.heads.model import Heads
from entmtp_calib.heads.native import heads_fingerprint, read_description
from entmtp_calib.plan import check_tree
from entmtp_calib.policy import Policy, Static
from entmtp_calib.stages.bench_figures import PLAIN, Written
from entmtp_calib.stages.decode import PLAIN as NONE
from entmtp_calib.stages.decode import Session
from entmtp_calib.stages.peers import LOOKUP_TOKENS, Peers
from entmtp_calib.stages.setup import DEFAULT_HEADS, Inputs, find_heads, open_heads
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT

MEDUSA_DEFAULT, EAGLE2 = "medusa-default", "eagle2"
EAGLE2_EXPAND = 10  # paths per level, as published
DEFAULT_MEDUSA_HEADS = DEFAULT_HEADS.with_name("smollm2-135m-instruct-medusa")


@dataclass(frozen=True)
class Method:
    """One way to write a text.

    Attributes:
        name: in tables and in --methods.
        generate: (prompt ids, number of tokens) -> the text, at most that long.
        claims_lossless: its text must be plain decoding's.
    """

    name: str
    generate: Callable[[Sequence[int], int], Written]
    claims_lossless: bool = True


class Absent(Exception):
    """The method cannot take part here; the message says why."""


class Workbench:
    """What the methods are made of; each part is made when a method asks for it.

    Args:
        session: the bank with its target and heads.
        inputs: what target and heads were loaded from.
        config: of the bench.
    """

    def __init__(self, session: Session, inputs: Inputs, config: BenchConfig) -> None:
        self.session, self.sampling, self.acceptance = session, config.sampling, config.acceptance
        self.peers = Peers(session.target, inputs.model)
        self._heads = inputs.heads
        self._medusa_folder = config.medusa_heads

    @cached_property
    def decoder(self) -> Decoder:
        """Over the bank's trees and Hydra's default."""
        return self.session.decoder(self.sampling, self.acceptance)

    @cached_property
    def heads_facts(self) -> dict[str, Any]:
        """What the record of a bench says of the bank's heads."""
        heads = self.session.heads
        name, folder = find_heads(self._heads, self.session.target)
        return {
            "name": name,
            "kind": heads.kind,
            "n_heads": heads.n_heads,
            "fingerprint": heads_fingerprint(folder),
        }

    @cached_property
    def medusa(self) -> tuple[Heads, dict[str, Any]]:
        """Medusa heads for the target, and what the record says of them.

        Without --medusa-heads the bank's heads if they are Medusa heads, else those of the embedded
        default, where they fit the target.

        Raises:
            Absent: there are none.
            HeadsError: those of --medusa-heads are no Medusa heads, or not the target's.
        """
        target, folder = self.session.target, self._medusa_folder
        if folder is None and self.session.heads.kind == "medusa":
            return self.session.heads, self.heads_facts
        if folder is None:
            folder = str(DEFAULT_MEDUSA_HEADS)
            if _made_for(DEFAULT_MEDUSA_HEADS) != target.fingerprint:
                raise Absent(f"no Medusa heads for {target.name}; --medusa-heads names some")
        heads, facts = open_heads(folder, target)
        if heads.kind != "medusa":
            raise HeadsError(f"--medusa-heads {folder}: {heads.kind} heads", "Medusa heads")
        return heads, facts


def method_names(bank: Bank, config: BenchConfig) -> list[str]:
    """The names of the methods to try, plain decoding first; by default all that may be possible.

    Raises:
        UsageError: naming those that exist for no bank, or heads that no method would use.
    """
    if config.methods is None:
        return list(dict.fromkeys([*METHODS, *bank.policies]))
    trees = [tree.id for tree in bank.trees]
    known = list(dict.fromkeys([*METHODS, *POLICIES, *bank.policies, NONE, *trees]))
    unknown = [name for name in config.methods if name not in known]
    if unknown:
        raise UsageError(f"--methods {','.join(unknown)}", f"some of {', '.join(known)}")
    if config.medusa_heads and MEDUSA_DEFAULT not in config.methods:
        raise UsageError("--medusa-heads without its method", f"{MEDUSA_DEFAULT} in --methods")
    return list(dict.fromkeys([PLAIN, *config.methods]))


def build(names: Sequence[str], workbench: Workbench) -> tuple[dict[str, Method], list[str]]:
    """The methods that can take part, by name, and a line on each that cannot."""
    methods, notes = {}, []
    for name in names:
        try:
            methods[name] = METHODS.get(name, partial(_of_the_bank, name))(workbench)
        except Absent as reason:
            notes.append(f"{name} takes no part: {reason}")
    return methods, notes


def _own(name: str, decoder: Decoder, policy: Policy | Dynamic) -> Method:
    """Our own loop with a policy."""
    return Method(
        name,
        lambda ids, n_tokens: Written.of(decoder.generate(ids, policy, n_tokens)),
        claims_lossless=decoder.acceptance.is_exact,
    )


def _plain(workbench: Workbench) -> Method:
    """The empty tree without any heads, which a prefix layer would make slower."""
    decoder = Decoder(workbench.session.target, None, [EMPTY], workbench.sampling)
    return _own(PLAIN, decoder, Static(0))


def _transformers(workbench: Workbench) -> Method:
    _check_greedy(workbench)
    return Method("transformers", workbench.peers.generate, claims_lossless=False)


def _prompt_lookup(workbench: Workbench) -> Method:
    _check_greedy(workbench)
    generate = partial(workbench.peers.generate, prompt_lookup_num_tokens=LOOKUP_TOKENS)
    return Method("prompt-lookup", generate, claims_lossless=False)


def _medusa_default(workbench: Workbench) -> Method:
    heads, _ = workbench.medusa
    _check_default_tree(heads)
    decoder = Decoder(
        workbench.session.target,
        heads,
        [HYDRA_DEFAULT],
        workbench.sampling,
        workbench.acceptance,
    )
    return _own(MEDUSA_DEFAULT, decoder, Static(0))


def _hydra_default(workbench: Workbench) -> Method:
    session = workbench.session
    if session.heads.kind != "hydra":
        raise Absent(f"the bank's heads are {session.heads.kind} heads")
    _check_default_tree(session.heads)
    return _own(HYDRA_DEFAULT.id, workbench.decoder, session.policy(HYDRA_DEFAULT.id))


def _eagle2(workbench: Workbench) -> Method:
    """A tree built anew each step, of the best static tree's size."""
    bank, heads = workbench.session.bank, workbench.session.heads
    nodes = bank.trees[bank.best].n_nodes
    if not nodes:
        raise Absent("the best static tree is the empty one")
    depth = min(heads.n_heads, nodes)
    return _own(EAGLE2, workbench.decoder, Dynamic(min(EAGLE2_EXPAND, nodes), nodes, depth))


def _of_the_bank(name: str, workbench: Workbench) -> Method:
    """A policy or a tree of the bank."""
    session = workbench.session
    if name in POLICIES and name not in session.bank.policies:
        raise Absent("the bank has no such policy")
    return _own(name, workbench.decoder, session.policy(name))


def _check_greedy(workbench: Workbench) -> None:
    if workbench.sampling.temperature > 0:
        raise Absent("transformers' draws are other draws, so it is compared at temperature 0")


def _check_default_tree(heads: Heads) -> None:
    try:
        check_tree(HYDRA_DEFAULT, heads)
    except TreeError as error:
        raise Absent(error.found) from None


def _made_for(folder: Path) -> str | None:
    """The fingerprint of the target that a folder's heads were made for; None without heads."""
    if not folder.is_dir():
        return None
    fingerprint: str | None = read_description(folder)["target"]["fingerprint"]
    return fingerprint


POLICIES = ("static", "ladder", "hysteresis", "staged")
"""Names that a bank's policies may have; a bank need not have all."""

METHODS: dict[str, Callable[[Workbench], Method]] = {
    PLAIN: _plain,
    "transformers": _transformers,
    "prompt-lookup": _prompt_lookup,
    MEDUSA_DEFAULT: _medusa_default,
    HYDRA_DEFAULT.id: _hydra_default,
    EAGLE2: _eagle2,
}
"""Methods by name, in the order of the table; the bank's policies stand behind them."""

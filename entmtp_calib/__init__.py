"""entmtp as a library: what programs use, by short names.

    target = entmtp_calib.load_target(...)          # or wrap_model(model, tokenizer)
    heads = entmtp_calib.load_heads(..., target)
    bank = entmtp_calib.Bank.load(...)              # build_bank(build_config(), Inputs()) makes one

`open_session` loads the three of a run at once. `Decoder` gives texts with a record of each step;
`EntmtpGenerator` is called as transformers' `generate` is. The names are fetched at first use
(PEP 562), so that the import itself loads nothing; all else is in the modules.
"""

from importlib import import_module

_HOMES = {
    "Bank": "bank",
    "Decoder": "decoding",
    "EntmtpError": "errors",
    "EntmtpGenerator": "generate.generator",
    "Inputs": "stages.setup",
    "SamplingConfig": "config",
    "Static": "policy",
    "Tree": "tree",
    "build_bank": "stages.build_bank",
    "build_config": "config",
    "load_heads": "stages.setup",
    "load_target": "targets.load",
    "open_session": "stages.decode",
    "wrap_model": "targets.load",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

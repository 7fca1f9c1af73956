"""What is known of each form: said once, and the same in the README."""

from __future__ import annotations

from pathlib import Path

import pytest

from entmtp_calib.errors import UsageError
from entmtp_calib.formats.engines import FORMS, form_named

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_readmes_table_has_every_form_as_the_code_knows_it() -> None:
    table = README[README.index("| `--format` |") :].split("\n\n")[0]
    assert table.splitlines()[2:] == [
        f"| `{form.name}` | {form.engine} | {form.versions} | {form.cannot} |"
        for form in FORMS.values()
    ]


def test_a_form_has_a_name() -> None:
    assert form_named("sglang") is FORMS["sglang"]
    with pytest.raises(UsageError, match="--format tree; expected one of medusa, trtllm"):
        form_named("tree")

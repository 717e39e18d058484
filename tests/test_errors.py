"""Suggestions for misspelt names."""

import pytest

from attncheck.core.errors import UnknownName, did_you_mean
from attncheck.core.formats import FORMATS

KNOWN = ("bf16", "fp16", "causal", "decode-causal", "ideal", "entry", "when", "paged")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("casual", "causal"),
        ("bf61", "bf16"),
        ("BF16", "bf16"),
        ("idael", "ideal"),
        ("decode-casual", "decode-causal"),
        ("override[0].wen", "when"),
    ],
)
def test_nearest_name_is_suggested(typed, meant):
    assert did_you_mean(typed, KNOWN) == f"did you mean {meant!r}?"
    assert f"is not known: did you mean {meant!r}? Choose from bf16" in str(
        UnknownName("name", typed, KNOWN)
    )


def test_suffixes_of_files_do_not_make_their_names_similar():
    assert did_you_mean("mien.py", ["hostile.py", "mine.py"]) == "did you mean 'mine.py'?"
    assert did_you_mean("gone.py", ["hostile.py", "mine.py"]) == ""


def test_torchs_dtype_names_suggest_ours():
    names = {name: fmt.torch_name for name, fmt in FORMATS.items() if name != "tf32"}
    names |= {"fp16": "half", "fp32": "torch.float"}
    for name, torch_name in names.items():
        assert did_you_mean(torch_name, FORMATS) == f"did you mean {name!r}?"
    assert did_you_mean("half", ["bf16"]) == ""


@pytest.mark.parametrize("typed", ["fp64", "bf8", "ragged", "why", "", "x" * 10_000])
def test_unrelated_name_gets_no_suggestion(typed):
    assert did_you_mean(typed, KNOWN) == ""
    assert "is not known: choose from bf16" in str(UnknownName("name", typed, KNOWN))
    assert did_you_mean(typed, ()) == ""

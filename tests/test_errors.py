"""Names that are misspelt: which one was meant."""

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
def test_the_nearest_name_is_offered(typed, meant):
    assert did_you_mean(typed, KNOWN) == f"did you mean {meant!r}?"
    assert f"is not known: did you mean {meant!r}? Choose from bf16" in str(
        UnknownName("name", typed, KNOWN)
    )


def test_of_files_the_names_are_compared_and_not_their_suffix():
    assert did_you_mean("mien.py", ["hostile.py", "mine.py"]) == "did you mean 'mine.py'?"
    assert did_you_mean("gone.py", ["hostile.py", "mine.py"]) == ""


def test_torch_s_names_of_dtypes_are_known():
    names = {name: each.torch_name for name, each in FORMATS.items() if name != "tf32"}
    names |= {"fp16": "half", "fp32": "torch.float"}
    for name, of_torch in names.items():
        assert did_you_mean(of_torch, FORMATS) == f"did you mean {name!r}?"
    assert did_you_mean("half", ["bf16"]) == ""


@pytest.mark.parametrize("typed", ["fp64", "bf8", "ragged", "why", "", "x" * 10_000])
def test_another_word_is_no_slip(typed):
    assert did_you_mean(typed, KNOWN) == ""
    assert "is not known: choose from bf16" in str(UnknownName("name", typed, KNOWN))
    assert did_you_mean(typed, ()) == ""

"""A cell by its name."""

import pytest

from attncheck.cases.variants import choose_cell, plan_cells
from attncheck.core.errors import UnknownName, UsageError
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.torch_kernels import Sdpa
from attncheck.verify.verify import case_subjects


def asked(*variants, dtypes=("fp32",), shapes=("1x2x5x4",)):
    cells = plan_cells(
        dtypes=dtypes, variants=variants, shapes=shapes, distributions=["normal"], seed=0
    )
    subjects = case_subjects([cell.problem for cell in cells], [Ideal(), Sdpa("math")], "cpu")
    return list(zip(cells, subjects, strict=True))


def name(found):
    cell, subject = found
    problem = cell.problem
    return (subject.name, cell.variant, problem.kv_heads, problem.dtype)


EVERYTHING = asked("full", "causal", "softmax", dtypes=("fp32", "bf16"))


@pytest.mark.parametrize(
    ("asked_for", "found"),
    [
        ("ideal/causal/MHA/fp32", ("ideal", "causal", 2, "fp32")),
        ("sdpa-math/full/MQA/bf16", ("sdpa-math", "full", 1, "bf16")),
        ("ideal/softmax/fp32", ("ideal", "softmax", 1, "fp32")),  # a softmax has no HEADS
    ],
)
def test_a_whole_name_finds_its_cell(asked_for, found):
    assert name(choose_cell(asked_for, EVERYTHING)) == found


def test_what_distinguishes_nothing_may_be_left_out():
    only = asked("causal", shapes=("1x2/1x5x4",))
    assert name(choose_cell("ideal/causal", only)) == ("ideal", "causal", 1, "fp32")
    assert name(choose_cell("ideal", only)) == ("ideal", "causal", 1, "fp32")


def test_an_ambiguous_name_lists_the_cells():
    with pytest.raises(UsageError) as excinfo:
        choose_cell("ideal/full/MHA", EVERYTHING)
    assert str(excinfo.value) == (
        "cell 'ideal/full/MHA' is one of ideal/full/MHA/fp32, ideal/full/MHA/bf16: "
        "name one of them."
    )


def test_cells_that_share_a_name_are_told_apart_by_their_problems():
    two = asked("full", shapes=("1x2/2x5x4", "1x2/2x6x4"))
    with pytest.raises(UsageError, match=r"is one of 2 problems .* ask for one shape") as excinfo:
        choose_cell("ideal/full/MHA/fp32", two)
    assert "Q5" in str(excinfo.value)
    assert "Q6" in str(excinfo.value)


ENDS = ("MHA/bf16", "MHA/fp32", "MQA/bf16", "MQA/fp32")
OF_CAUSAL = [f"ideal/causal/{end}" for end in ENDS]
OF_SDPA = [f"sdpa-math/{variant}/{end}" for variant in ("causal", "full") for end in ENDS]


@pytest.mark.parametrize(
    ("asked_for", "there_are"),
    [
        ("flash9/causal", ["ideal", "sdpa-math"]),  # 18 labels, too many to list
        ("ideal/causal/GQA", OF_CAUSAL),
        ("ideal/causal/MHA/fp16", OF_CAUSAL[:2]),
        ("ideal/causal/MHA/fp32/more", OF_CAUSAL[1:2]),
        ("idea", ["ideal", "sdpa-math"]),
        ("", ["ideal", "sdpa-math"]),
        ("sdpa-math/softmax", OF_SDPA),
    ],
)
def test_an_unknown_name_lists_what_there_is(asked_for, there_are):
    with pytest.raises(UnknownName) as excinfo:
        choose_cell(asked_for, EVERYTHING)
    known = str(excinfo.value).removeprefix(f"cell {asked_for!r} is not known: ")
    assert known.partition("hoose from ")[2] == f"{', '.join(there_are)}."


def test_a_misspelt_part_of_a_name_is_corrected():
    with pytest.raises(UnknownName, match=r"did you mean 'sdpa-math/causal'\? Choose from sdpa"):
        choose_cell("sdpa-math/casual", EVERYTHING)


def test_a_name_with_a_slash_is_a_name():
    class Mine(Ideal):
        name = "my/kernel"

    both = [(asked("full")[0][0], [Mine(), Ideal()])]
    assert name(choose_cell("my/kernel/full", both))[0] == "my/kernel"

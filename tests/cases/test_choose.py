"""Choice of a cell of ``attncheck rmse`` by its name, KERNEL/VARIANT/HEADS/DTYPE."""

import pytest

from attncheck.cases.variants import choose_cell, plan_cells
from attncheck.core.errors import UnknownName, UsageError
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.torch_kernels import Sdpa
from attncheck.verify.verify import case_subjects


def make_cells(*variants, dtypes=("fp32",), shapes=("1x2x5x4",)):
    cells = plan_cells(
        dtypes=dtypes, variants=variants, shapes=shapes, distributions=["normal"], seed=0
    )
    subjects = case_subjects([cell.problem for cell in cells], [Ideal(), Sdpa("math")], "cpu")
    return list(zip(cells, subjects, strict=True))


def label(choice):
    cell, subject = choice
    problem = cell.problem
    return (subject.name, cell.variant, problem.kv_heads, problem.dtype)


EVERYTHING = make_cells("full", "causal", "softmax", dtypes=("fp32", "bf16"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ideal/causal/MHA/fp32", ("ideal", "causal", 2, "fp32")),
        ("sdpa-math/full/MQA/bf16", ("sdpa-math", "full", 1, "bf16")),
        ("ideal/softmax/fp32", ("ideal", "softmax", 1, "fp32")),  # a softmax has no HEADS
    ],
)
def test_full_name_chooses_its_cell(name, expected):
    assert label(choose_cell(name, EVERYTHING)) == expected


@pytest.mark.parametrize("name", ["ideal/causal", "ideal"])
def test_parts_that_distinguish_nothing_may_be_omitted(name):
    only = make_cells("causal", shapes=("1x2/1x5x4",))
    assert label(choose_cell(name, only)) == ("ideal", "causal", 1, "fp32")


def test_ambiguous_name_lists_the_matching_cells():
    with pytest.raises(UsageError) as excinfo:
        choose_cell("ideal/full/MHA", EVERYTHING)
    assert str(excinfo.value) == (
        "cell 'ideal/full/MHA' is one of ideal/full/MHA/fp32, ideal/full/MHA/bf16: "
        "name one of them."
    )


def test_cells_with_the_same_name_are_listed_by_their_problems():
    two = make_cells("full", shapes=("1x2/2x5x4", "1x2/2x6x4"))
    with pytest.raises(UsageError, match=r"is one of 2 problems .* ask for one shape") as excinfo:
        choose_cell("ideal/full/MHA/fp32", two)
    assert "Q5" in str(excinfo.value)
    assert "Q6" in str(excinfo.value)


ENDS = ("MHA/bf16", "MHA/fp32", "MQA/bf16", "MQA/fp32")
OF_CAUSAL = [f"ideal/causal/{end}" for end in ENDS]
OF_SDPA = [f"sdpa-math/{variant}/{end}" for variant in ("causal", "full") for end in ENDS]


@pytest.mark.parametrize(
    ("name", "choices"),
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
def test_unknown_name_lists_the_nearest_choices(name, choices):
    with pytest.raises(UnknownName) as excinfo:
        choose_cell(name, EVERYTHING)
    message = str(excinfo.value).removeprefix(f"cell {name!r} is not known: ")
    assert message.partition("hoose from ")[2] == f"{', '.join(choices)}."


def test_misspelt_part_of_a_name_is_corrected():
    with pytest.raises(UnknownName, match=r"did you mean 'sdpa-math/causal'\? Choose from sdpa"):
        choose_cell("sdpa-math/casual", EVERYTHING)


def test_kernel_name_may_contain_a_slash():
    class Mine(Ideal):
        name = "my/kernel"

    both = [(make_cells("full")[0][0], [Mine(), Ideal()])]
    assert label(choose_cell("my/kernel/full", both))[0] == "my/kernel"

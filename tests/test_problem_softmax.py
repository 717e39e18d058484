"""Problems of the operation softmax: fields, ids, and messages for bad input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import one_line

from attncheck.core.errors import ProblemError, UnknownName, UsageError
from attncheck.core.mod_spec import Spec
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import Problem

SOFTMAX = Problem(operation="softmax", batch=2, heads=3, query=5, kv=7, dtype="fp32")


def test_fields_of_attention_have_neutral_values():
    assert (SOFTMAX.kv_heads, SOFTMAX.group) == (3, 1)
    assert (SOFTMAX.head_dim, SOFTMAX.value_dim, SOFTMAX.scale) == (0, 0, 1.0)
    assert (SOFTMAX.mask, SOFTMAX.score) == (Spec.of("full"), Spec.of("none"))
    assert Problem(operation="softmax", query=9).kv == 9


def test_text_names_rows_and_columns():
    assert SOFTMAX.shape == "B2 H3 R5 C7"
    assert str(SOFTMAX) == "fp32 softmax B2 H3 R5 C7 normal seed 0"


def test_ids_are_the_same_in_every_version():
    assert SOFTMAX.id == "u3wrb5xkv7"


def test_json_leaves_out_the_default_operation_attention():
    """So attention Problems keep the ids that they had before there were operations."""
    attention = Problem(query=8)
    assert "operation" not in attention.to_json()
    assert Problem.from_json(attention.to_json() | {"operation": "attention"}) == attention
    assert attention.id != Problem(operation="softmax", query=8).id


@pytest.mark.parametrize(
    "fields", [{"head_dim": 0.0}, {"value_dim": False}, {"scale": 1}, {"scale": True}]
)
def test_equal_values_of_another_type_give_the_same_json(fields):
    problem = Problem.from_json({"operation": "softmax", "query": 8} | fields)
    assert problem.to_json() == Problem(operation="softmax", query=8).to_json()


def test_replace_can_change_the_operation_where_all_fields_fit():
    assert SOFTMAX.replace(operation="attention").head_dim == 64
    with pytest.raises(ProblemError, match="head_dim=64 has no meaning for softmax"):
        Problem(query=8).replace(operation="softmax")


SIZE = "must be a whole number of at least 1."
MEANINGLESS = "has no meaning for softmax."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 64}, f"head_dim=64 {MEANINGLESS}"),
        ({"head_dim": "a"}, f"head_dim='a' {MEANINGLESS}"),
        ({"head_dim": None}, f"head_dim=None {MEANINGLESS}"),
        ({"value_dim": 1}, f"value_dim=1 {MEANINGLESS}"),
        ({"value_dim": [1]}, f"value_dim=[1] {MEANINGLESS}"),
        ({"scale": 0.5}, f"scale=0.5 {MEANINGLESS}"),
        ({"scale": "1"}, f"scale='1' {MEANINGLESS}"),
        ({"mask": {"name": "causal"}}, f"mask=causal {MEANINGLESS}"),
        ({"score": {"name": "alibi"}}, f"score=alibi {MEANINGLESS}"),
        ({"heads": 4, "kv_heads": 2}, f"kv_heads=2 {MEANINGLESS}"),
        ({"query": 0}, f"query=0 {SIZE}"),
        ({"kv": -1}, f"kv=-1 {SIZE}"),
        ({"batch": 1.5}, f"batch=1.5 {SIZE}"),
        ({"heads": "4"}, f"heads='4' {SIZE}"),
        ({"seed": -1}, "seed=-1 must be from 0 to 2**63 − 1."),
        ({"dtype": "tf32"}, "softmax has no dtype 'tf32': choose from fp32, fp16, bf16."),
        ({"dtype": "e4m3"}, "softmax has no dtype 'e4m3': choose from fp32, fp16, bf16."),
    ],
)
def test_bad_field_is_rejected_in_one_line(fields, message):
    with one_line(ProblemError, whole=message):
        Problem.from_json({"operation": "softmax", "query": 8} | fields)


def test_distribution_without_scores_lists_those_with_scores():
    names = ", ".join(name for name, distribution in DISTRIBUTIONS.items() if distribution.scores)
    message = f"distribution 'ones_v' has no scores for softmax: choose from {names}."
    with one_line(ProblemError, whole=message):
        Problem(operation="softmax", query=8, distribution="ones_v")


@pytest.mark.parametrize("operation", ["softmin", "", None, [], 5])
def test_unknown_operation_lists_the_known_ones(operation):
    with one_line(
        UnknownName, whole=f"operation {operation!r} is not known: choose from attention, softmax."
    ):
        Problem.from_json({"operation": operation, "query": 8})


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)


@given(
    st.sampled_from(sorted(SOFTMAX.to_json())),
    values | st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=4), values),
)
def test_any_json_gives_a_problem_or_a_one_line_error(field, value):
    try:
        problem = Problem.from_json({"operation": "softmax", "query": 8} | {field: value})
    except UsageError as error:
        lines = str(error).splitlines()
    else:
        lines = [str(problem)]
        assert Problem.from_json(problem.to_json()) == problem
    assert len(lines) == 1

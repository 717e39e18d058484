"""Problem and Case: JSON, stable ids, and one-line messages for bad input."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import one_line

from attncheck.core.errors import ProblemError, UnknownName, UsageError
from attncheck.core.formats import DTYPES, fp32
from attncheck.core.mod_spec import GENERATOR, Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import Case, Problem

RICH = Problem(
    batch=2,
    heads=6,
    kv_heads=3,
    query=128,
    kv=96,
    head_dim=40,
    value_dim=72,
    dtype="fp16",
    mask=Spec.of("and", Spec.of("causal"), Spec.of("not", Spec.of("padding", lengths=[96, 17]))),
    score=Spec.of("chain", Spec.of("alibi"), Spec.of("softcap", cap=30.1)),
    scale=0.3,
    distribution="outliers",
    seed=7,
)


@st.composite
def masks(draw, batch: int, query: int, kv: int) -> Spec:
    leaves = st.one_of(
        st.sampled_from(["full", "causal", "causal_bottom_right"]).map(Spec.of),
        st.builds(lambda n: Spec.of("sliding_window", window=n), st.integers(0, 300)),
        st.builds(lambda n: Spec.of("prefix_lm", prefix=n), st.integers(0, 300)),
        st.builds(
            lambda cut: Spec.of("document", lengths=[cut, max(query, kv)]), st.integers(0, 9)
        ),
        st.builds(
            lambda n: Spec.of("padding", lengths=n),
            st.lists(st.integers(0, kv), min_size=batch, max_size=batch),
        ),
    )
    return draw(
        st.recursive(
            leaves,
            lambda parts: st.one_of(
                st.lists(parts, min_size=1, max_size=3).map(lambda p: Spec.of("and", *p)),
                st.lists(parts, min_size=1, max_size=3).map(lambda p: Spec.of("or", *p)),
                parts.map(lambda p: Spec.of("not", p)),
            ),
            max_leaves=4,
        )
    )


positive = st.floats(2.0**-149, 3e38)
scores = st.one_of(
    st.sampled_from(["none", "alibi"]).map(Spec.of),
    positive.map(lambda cap: Spec.of("softcap", cap=cap)),
    positive.map(lambda t: Spec.of("chain", Spec.of("temperature", temperature=t))),
)


@st.composite
def problems(draw) -> Problem:
    batch, query, kv = draw(st.integers(1, 3)), draw(st.integers(1, 200)), draw(st.integers(1, 200))
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Problem(
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        query=query,
        kv=kv,
        head_dim=draw(st.integers(1, 256)),
        value_dim=draw(st.integers(1, 256)),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        mask=draw(masks(batch, query, kv)),
        score=draw(scores),
        scale=draw(positive),
        distribution=draw(st.sampled_from(sorted(DISTRIBUTIONS))),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@given(problems())
def test_problem_survives_a_json_round_trip(problem):
    copy = Problem.from_json(json.loads(json.dumps(problem.to_json())))
    assert copy == problem
    assert copy.id == problem.id


@given(problems(), st.dictionaries(st.text(max_size=5), st.integers() | st.floats(-1e9, 1e9)))
def test_case_survives_a_json_round_trip(problem, parameters):
    case = Case(problem=problem, question="permute_keys", parameters=parameters)
    copy = Case.from_json(json.loads(json.dumps(case.to_json())))
    assert copy == case
    assert copy.id == case.id


def test_ids_are_the_same_in_every_version():
    assert Problem(query=128).id == "rrowmsnjou"
    assert RICH.id == "5wwzn3fpss"
    assert Case(problem=RICH, question="scale_v", parameters={"power": 3}).id == "5zwwdrxlpk"


def test_ids_differ_between_problems():
    changes = [
        {"batch": 3, "mask": Spec.of("full")},
        {"mask": Spec.of("full")},
        {"heads": 12},
        {"kv_heads": 6},
        {"query": 129},
        {"kv": 97},
        {"head_dim": 41},
        {"value_dim": 71},
        {"dtype": "bf16"},
        {"score": Spec.of("none")},
        {"scale": 0.25},
        {"scale": -0.25},
        {"scale": 0.0},
        {"sink": True},
        {"sink": True, "sink_logits": "above"},
        {"paging": Paging(size=16)},
        {"backward": True},
        {"backward": True, "dlse": True},
        {"backward": True, "score": Spec.of("alibi")},
        {"backward": True, "score": Spec.of("alibi"), "dcaptured": True},
        {"distribution": "normal"},
        {"seed": 8},
    ]
    fields = {field for change in changes for field in change}
    assert fields | {"operation"} == {field.name for field in dataclasses.fields(Problem)}
    assert len({RICH.id, *(RICH.replace(**change).id for change in changes)}) == len(changes) + 1


def test_ids_differ_between_cases():
    cases = [
        Case(problem=RICH),
        Case(problem=RICH, question="scale_v"),
        Case(problem=RICH, parameters={"power": 1}),
        Case(problem=RICH, generator=GENERATOR + 1),
        Case(problem=RICH.replace(seed=0)),
    ]
    assert len({case.id for case in cases} | {RICH.id}) == len(cases) + 1


def test_defaults_follow_from_the_other_fields():
    problem = Problem(query=100, heads=4, head_dim=40)
    assert (problem.kv_heads, problem.kv, problem.value_dim) == (4, 100, 40)
    assert problem.scale == fp32(1 / math.sqrt(40))
    assert problem == Problem(query=100, heads=4, head_dim=40, scale=1 / math.sqrt(40))
    assert problem.replace(value_dim=8).scale == problem.scale
    assert Problem(query=1, head_dim=40, value_dim=8).scale == problem.scale
    assert problem.replace(head_dim=64).value_dim == 40  # defaults are set once, when it is made


def test_json_may_leave_defaults_out():
    assert Problem.from_json({"query": 9}) == Problem(query=9)
    assert Case.from_json({"problem": {"query": 9}}) == Case(problem=Problem(query=9))


def test_numbers_are_rounded_to_fp32():
    problem = Problem(query=8, scale=0.1, score=Spec.of("softcap", cap=0.1))
    assert problem.scale == fp32(0.1) != 0.1
    assert problem.score.values["cap"] == fp32(0.1)
    assert problem == Problem(query=8, scale=fp32(0.1), score=Spec.of("softcap", cap=fp32(0.1)))


def test_text_names_shape_mask_scores_distribution_and_seed():
    assert RICH.shape == "B2 H6/3 Q128 K96 D40/72"
    assert str(RICH) == (
        "fp16 and(causal, not(padding(lengths=(96,17)))) "
        f"chain(alibi, softcap(cap={fp32(30.1)})) B2 H6/3 Q128 K96 D40/72 outliers seed 7 "
        "scale 0.3"
    )
    assert str(Problem(query=8)) == "bf16 full B1 H1 Q8 K8 D64 normal seed 0"
    assert RICH.group == 2


SIZE = "must be a whole number of at least 1."
SCALE = "must be a number in the range of fp32."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query": 0}, f"query=0 {SIZE}"),
        ({"query": 2.0}, f"query=2.0 {SIZE}"),
        ({"query": True}, f"query=True {SIZE}"),
        ({"query": None}, f"query=None {SIZE}"),
        ({"batch": -1}, f"batch=-1 {SIZE}"),
        ({"heads": "4"}, f"heads='4' {SIZE}"),
        (
            {"heads": 4, "kv_heads": 3},
            (
                "kv_heads=3 does not divide heads=4: "
                "each key head serves the same number of query heads."
            ),
        ),
        ({"head_dim": 257}, "head_dim=257 must be 1–256."),
        ({"value_dim": 300}, "value_dim=300 must be 1–256."),
        ({"seed": -1}, "seed=-1 must be from 0 to 2**63 − 1."),
        ({"seed": 2**63}, f"seed={2**63} must be from 0 to 2**63 − 1."),
        ({"seed": 1.5}, "seed=1.5 must be a whole number."),
        ({"scale": math.nan}, f"scale=nan {SCALE}"),
        ({"scale": math.inf}, f"scale=inf {SCALE}"),
        ({"scale": 1e39}, f"scale=1e+39 {SCALE}"),
        ({"scale": 1e-46}, f"scale=1e-46 {SCALE}"),
        ({"scale": "1"}, f"scale='1' {SCALE}"),
        ({"scale": None}, f"scale=None {SCALE}"),
        ({"scale": [1]}, f"scale=[1] {SCALE}"),
        ({"scale": True}, f"scale=True {SCALE}"),
        (
            {"sink": True, "sink_logits": "infinite"},
            "sink_logits='infinite' must be one of above, below, equal, absent.",
        ),
        (
            {"sink_logits": "above"},
            "sink_logits='above' has no meaning without sink=True.",
        ),
        ({"mask": 5}, "a mod is an object with a name, not 5."),
        ({"mask": {"window": 5}}, "a mod is an object with a name, not {'window': 5}."),
        (
            {"mask": {"name": "sliding_window", "window": "a"}},
            "sliding_window.window='a' must be a whole number from 0 to 2147483647.",
        ),
        ({"mask": {"name": "and", "of": 3}}, "and.of must be a list of mods, not 3."),
        ({"mask": {"name": "sliding_window"}}, "sliding_window needs its argument 'window'."),
        (
            {"mask": {"name": "causal", "window": 5}},
            "causal has no argument 'window': its arguments: none.",
        ),
        ({"keys": 5}, "a problem has no field 'keys'."),
    ],
)
def test_bad_field_is_rejected_in_one_line(fields, message):
    with one_line(ProblemError, whole=message):
        Problem.from_json({"query": 8} | fields)


@pytest.mark.parametrize("data", [None, 5, "causal", [1]])
def test_json_that_is_not_an_object_is_rejected(data):
    with one_line(ProblemError, whole=f"a problem is a JSON object, not {data!r}."):
        Problem.from_json(data)
    with one_line(ProblemError, whole="a case is a JSON object with a problem."):
        Case.from_json(data)


def test_query_length_is_required():
    with one_line(ProblemError, whole="a problem needs its query length."):
        Problem.from_json({})


@pytest.mark.parametrize(
    ("fields", "kind", "names"),
    [
        ({"dtype": "fp12"}, "dtype 'fp12'", "bf16, e4m3, e5m2, fp16, fp32, fp64, tf32"),
        ({"dtype": []}, "dtype []", "bf16, e4m3, e5m2, fp16, fp32, fp64, tf32"),
        ({"distribution": "gauss"}, "distribution 'gauss'", ", ".join(sorted(DISTRIBUTIONS))),
        ({"distribution": {}}, "distribution {}", ", ".join(sorted(DISTRIBUTIONS))),
        ({"mask": {"name": "triangle"}}, "mask 'triangle'", None),
        ({"mask": {"name": "not", "of": [{"name": "alibi"}]}}, "mask 'alibi'", None),
        ({"score": {"name": "causal"}}, "score mod 'causal'", None),
    ],
)
def test_unknown_name_lists_the_valid_ones(fields, kind, names):
    with one_line(UnknownName, start=f"{kind} is not known: choose from ") as error:
        Problem.from_json({"query": 8} | fields)
    assert names is None or str(error.value).endswith(f"{names}.")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
json_mods = st.fixed_dictionaries(
    {"name": st.sampled_from(["causal", "padding", "and", "softcap", "document"])},
    optional={"lengths": json_values, "of": json_values, "cap": json_values},
)


@given(
    st.sampled_from([field.name for field in dataclasses.fields(Problem)]), json_values | json_mods
)
def test_any_json_gives_a_problem_or_a_one_line_error(field, value):
    try:
        problem = Problem.from_json({"query": 8} | {field: value})
    except UsageError as error:
        lines = str(error).splitlines()
    else:
        lines = [str(problem)]
        assert Problem.from_json(problem.to_json()) == problem
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"generator": GENERATOR + 1},
            (f"the case was drawn by generator {GENERATOR + 1}; this version draws {GENERATOR}."),
        ),
        ({"question": 5}, "a case's question is a name, not 5."),
        ({"parameters": [1]}, "a case's parameters are numbers by name, not [1]."),
        (
            {"parameters": {"power": "a"}},
            "a case's parameters are numbers by name, not {'power': 'a'}.",
        ),
    ],
)
def test_case_that_cannot_be_drawn_is_rejected(fields, message):
    with one_line(ProblemError, whole=message):
        Case.from_json({"problem": {"query": 8}} | fields)


def test_problem_is_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RICH.seed = 1
    assert len({RICH, RICH.replace()}) == 1

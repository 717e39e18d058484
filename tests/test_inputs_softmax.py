"""Inputs of a softmax: scores drawn once and rounded once, and empty q, k and v."""

import hashlib

import pytest
import torch
from tests.messages import one_line

from attncheck.core.errors import ProblemError
from attncheck.core.formats import round_to
from attncheck.inputs import distributions, input_tensors
from attncheck.inputs.distributions import DISTRIBUTIONS, Sizes
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import SOFTMAX_DTYPES, Problem

WITH_SCORES = [name for name, d in DISTRIBUTIONS.items() if d.scores]


def softmax(**changes: object) -> Problem:
    fields = {"operation": "softmax", "batch": 2, "heads": 3, "query": 5, "kv": 7, "dtype": "bf16"}
    return Problem(**fields | changes)


def drawn_scores(problem: Problem) -> torch.Tensor:
    sizes = Sizes(**{n: getattr(problem, n) for n in Sizes.__dataclass_fields__})
    return torch.from_numpy(distributions.draw_scores(problem.distribution, sizes, problem.seed))


@pytest.mark.parametrize("dtype", SOFTMAX_DTYPES)
def test_inputs_are_scores_with_empty_q_k_and_v(dtype):
    drawn = input_tensors.draw_inputs(softmax(dtype=dtype))
    assert drawn.x.shape == (2, 3, 5, 7)
    assert drawn.x.dtype == softmax(dtype=dtype).formats.storage.torch_dtype
    assert drawn.x.is_contiguous()
    assert [tuple(t.shape) for t in (drawn.q, drawn.k, drawn.v)] == [
        (2, 3, 5, 0),
        (2, 3, 7, 0),
        (2, 3, 7, 0),
    ]
    assert drawn.descale is None
    assert list(drawn.tensors()) == ["q", "k", "v", "x"]


@pytest.mark.parametrize("dtype", SOFTMAX_DTYPES)
@pytest.mark.parametrize("name", WITH_SCORES)
def test_stored_scores_are_the_drawn_ones_rounded_once(dtype, name):
    problem = softmax(dtype=dtype, distribution=name, seed=3)
    exact = drawn_scores(problem)
    stored = input_tensors.draw_inputs(problem)
    assert torch.equal(stored.x.double(), round_to(exact, problem.formats.storage))
    assert stored.scores().dtype == torch.float64
    assert torch.equal(stored.scores(), stored.x.double())
    assert torch.equal(input_tensors.unrounded_inputs(problem).x, exact)
    assert torch.equal(
        input_tensors.round_inputs(input_tensors.unrounded_inputs(problem), problem).x, stored.x
    )


def test_scores_have_the_golden_bits():
    x = input_tensors.draw_inputs(softmax(seed=2026)).x
    digest = hashlib.sha256(x.view(torch.int16).numpy().astype("<i2").tobytes())
    assert digest.hexdigest()[:16] == "56bbb219bedd567a"


def test_scores_depend_on_the_problem_and_its_seed_alone():
    problem = softmax()
    assert torch.equal(input_tensors.draw_inputs(problem).x, input_tensors.draw_inputs(problem).x)
    assert not torch.equal(
        input_tensors.draw_inputs(problem).x, input_tensors.draw_inputs(problem.replace(seed=1)).x
    )


def test_clone_to_and_replace_include_the_scores():
    drawn = input_tensors.draw_inputs(softmax())
    copy = drawn.clone()
    copy.x.zero_()
    assert drawn.x.any()
    assert drawn.to("meta").x.device.type == "meta"
    other = torch.zeros_like(drawn.x)
    assert drawn.replace(x=other).x is other


def test_attention_has_no_scores_as_inputs():
    with one_line(ProblemError, whole="attention has no scores as inputs."):
        input_tensors.draw_inputs(Problem(query=3, head_dim=2)).scores()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: Inputs(problem=i.problem, q=i.q, k=i.k, v=i.v), "softmax in bf16 needs its x."),
        (lambda i: i.replace(x=i.x[..., :-1]), "x.shape=(2, 3, 5, 6), but should be (2, 3, 5, 7)."),
        (
            lambda i: i.replace(x=i.x.float()),
            "x.dtype=torch.float32, but should be torch.bfloat16.",
        ),
        (
            lambda i: i.replace(q=torch.zeros(2, 3, 5, 1, dtype=torch.bfloat16)),
            "q.shape=(2, 3, 5, 1), but should be (2, 3, 5, 0).",
        ),
        (
            lambda i: i.replace(
                descale=input_tensors.draw_inputs(Problem(query=3, dtype="e4m3")).descale
            ),
            "softmax in bf16 has no descale.",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_problem_are_rejected(change, message):
    drawn = input_tensors.draw_inputs(softmax())
    with one_line(ProblemError, whole=message):
        change(drawn)


@pytest.mark.parametrize("name", WITH_SCORES)
def test_fp16_scores_never_overflow(name):
    """The sink's score grows with the number of columns."""
    for problem in (softmax(kv=2**16, heads=1, query=1), softmax(kv=1)):
        drawn = input_tensors.draw_inputs(problem.replace(dtype="fp16", distribution=name))
        assert drawn.x.isfinite().all()

"""A backward's Inputs: the loss's gradients, beside numbers that stay what they were."""

import pytest
import torch

from attncheck.core.errors import ProblemError
from attncheck.core.formats import round_to
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs import input_tensors
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem

FORWARD = Problem(
    batch=2, heads=4, kv_heads=2, query=5, kv=7, head_dim=8, value_dim=3, dtype="fp16", sink=True
)
BACKWARD = FORWARD.replace(backward=True)
WITH_LSE = BACKWARD.replace(dlse=True)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "fp64"])
def test_the_loss_has_the_shapes_of_what_it_is_of(dtype):
    drawn = input_tensors.draw_inputs(WITH_LSE.replace(dtype=dtype))
    assert drawn.dout.shape == (2, 4, 5, 3)
    assert drawn.dout.dtype == drawn.problem.formats.output.torch_dtype
    assert drawn.dlse.shape == (2, 4, 5)
    assert drawn.dlse.dtype == torch.float32
    assert list(drawn.tensors()) == ["q", "k", "v", "sink", "dout", "dlse"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_dout_is_rounded_once_and_dlse_is_fp32_in_every_dtype(dtype):
    problem = WITH_LSE.replace(dtype=dtype)
    exact, stored = input_tensors.unrounded_inputs(problem), input_tensors.draw_inputs(problem)
    assert exact.dout.dtype == torch.float64
    assert torch.equal(stored.dout.double(), round_to(exact.dout, problem.formats.output))
    assert torch.equal(stored.dlse, input_tensors.draw_inputs(WITH_LSE).dlse)
    dout, dlse = stored.loss()
    assert torch.equal(dout, stored.dout.double())
    assert torch.equal(dlse, stored.dlse.double())


def test_without_dlse_the_loss_does_not_depend_on_it():
    _, dlse = input_tensors.draw_inputs(BACKWARD).loss()
    assert dlse.shape == (2, 4, 5)
    assert not dlse.any()


def test_the_numbers_of_the_forward_stay_what_they_were():
    forward, backward = input_tensors.draw_inputs(FORWARD), input_tensors.draw_inputs(WITH_LSE)
    for name, tensor in forward.tensors().items():
        assert torch.equal(tensor, backward.tensors()[name])
    again = backward.forward()
    assert again.problem == FORWARD
    assert list(again.tensors()) == ["q", "k", "v", "sink"]


def test_other_seeds_and_other_tensors_are_other_streams():
    one, other = (
        input_tensors.draw_inputs(BACKWARD.replace(seed=seed, value_dim=8)) for seed in (0, 1)
    )
    assert not torch.equal(one.dout, other.dout)
    assert not torch.equal(one.dout, one.q)


def test_a_loss_moves_and_is_copied_with_the_rest():
    drawn = input_tensors.draw_inputs(WITH_LSE)
    copy = drawn.clone()
    assert torch.equal(copy.dout, drawn.dout)
    assert copy.dout.data_ptr() != drawn.dout.data_ptr()
    changed = drawn.replace(dout=torch.zeros_like(drawn.dout))
    assert not changed.dout.any()
    assert changed.dlse is drawn.dlse


@pytest.mark.parametrize(
    ("problem", "changes", "said"),
    [
        (BACKWARD, {"dout": None}, "attention in fp16 needs its dout"),
        (FORWARD, {"dout": torch.zeros(2, 4, 5, 3)}, "attention in fp16 has no dout"),
        (BACKWARD, {"dlse": torch.zeros(2, 4, 5)}, "attention in fp16 has no dlse"),
        (BACKWARD, {"dout": torch.zeros(2, 4, 5, 4)}, r"dout.shape=\(2, 4, 5, 4\), but should be"),
        (BACKWARD, {"dout": torch.zeros(2, 4, 5, 3)}, "dout.dtype=torch.float32, but should be"),
        (WITH_LSE, {"dlse": torch.zeros(2, 4, 5).half()}, "dlse.dtype=torch.float16, but should"),
    ],
)
def test_a_loss_that_is_not_the_problems_is_refused(problem, changes, said):
    given = input_tensors.draw_inputs(problem).tensors() | changes
    with pytest.raises(ProblemError, match=said):
        Inputs(problem=problem, **given)


def test_a_forward_has_no_loss():
    with pytest.raises(ProblemError, match="no backward, and so no loss"):
        input_tensors.draw_inputs(FORWARD).loss()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"backward": 1}, "backward=1 must be true or false"),
        ({"dlse": True}, "dlse=True has no meaning without backward=True"),
        ({"dcaptured": 1}, "dcaptured=1 must be true or false"),
        ({"dcaptured": True}, "dcaptured=True has no meaning without backward=True"),
        (
            {"backward": True, "dcaptured": True},
            "no meaning for score mod 'none': it reads no float",
        ),
        ({"backward": True, "dtype": "e4m3"}, "there are no gradients in e4m3"),
        ({"backward": True, "sink": False, "paging": Paging(size=16)}, "no gradients of keys in"),
    ],
)
def test_a_backward_that_cannot_be_is_refused(changes, said):
    with pytest.raises(ProblemError, match=said):
        FORWARD.replace(**changes)


def test_a_softmax_has_no_backward():
    with pytest.raises(ProblemError, match="backward=True has no meaning for softmax"):
        Problem(operation="softmax", query=3, kv=4, backward=True)


def test_a_backward_is_another_problem_and_says_so():
    assert BACKWARD.id != FORWARD.id != WITH_LSE.id
    assert "backward" not in FORWARD.to_json()
    assert Problem.from_json(WITH_LSE.to_json()) == WITH_LSE
    assert " backward dLSE " in str(WITH_LSE)
    of_slopes = BACKWARD.replace(score=Spec.of("alibi"), dcaptured=True)
    assert of_slopes.id != of_slopes.replace(dcaptured=False).id
    assert Problem.from_json(of_slopes.to_json()) == of_slopes
    assert "dcaptured" not in BACKWARD.to_json()
    assert " backward dcaptured " in str(of_slopes)
    assert not input_tensors.draw_inputs(of_slopes).forward().problem.dcaptured

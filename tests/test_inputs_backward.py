"""Inputs of a backward: dOut and dLSE, drawn without changing the forward's numbers."""

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
def test_dout_and_dlse_have_the_shapes_and_dtypes_of_out_and_lse(dtype):
    drawn = input_tensors.draw_inputs(WITH_LSE.replace(dtype=dtype))
    assert drawn.dout.shape == (2, 4, 5, 3)
    assert drawn.dout.dtype == drawn.problem.formats.output.torch_dtype
    assert drawn.dlse.shape == (2, 4, 5)
    assert drawn.dlse.dtype == torch.float32
    assert list(drawn.tensors()) == ["q", "k", "v", "sink", "dout", "dlse"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_dout_is_rounded_once_and_dlse_is_the_same_in_every_dtype(dtype):
    problem = WITH_LSE.replace(dtype=dtype)
    exact, stored = input_tensors.unrounded_inputs(problem), input_tensors.draw_inputs(problem)
    assert exact.dout.dtype == torch.float64
    assert torch.equal(stored.dout.double(), round_to(exact.dout, problem.formats.output))
    assert torch.equal(stored.dlse, input_tensors.draw_inputs(WITH_LSE).dlse)
    dout, dlse = stored.loss()
    assert torch.equal(dout, stored.dout.double())
    assert torch.equal(dlse, stored.dlse.double())


def test_loss_without_dlse_has_a_dlse_of_zeros():
    _, dlse = input_tensors.draw_inputs(BACKWARD).loss()
    assert dlse.shape == (2, 4, 5)
    assert not dlse.any()


def test_backward_inputs_contain_the_forwards_numbers():
    forward, backward = input_tensors.draw_inputs(FORWARD), input_tensors.draw_inputs(WITH_LSE)
    for name, tensor in forward.tensors().items():
        assert torch.equal(tensor, backward.tensors()[name])
    reduced = backward.forward()
    assert reduced.problem == FORWARD
    assert list(reduced.tensors()) == ["q", "k", "v", "sink"]


def test_dout_differs_between_seeds_and_from_q():
    first, second = (
        input_tensors.draw_inputs(BACKWARD.replace(seed=seed, value_dim=8)) for seed in (0, 1)
    )
    assert not torch.equal(first.dout, second.dout)
    assert not torch.equal(first.dout, first.q)


def test_clone_and_replace_include_the_loss():
    drawn = input_tensors.draw_inputs(WITH_LSE)
    copy = drawn.clone()
    assert torch.equal(copy.dout, drawn.dout)
    assert copy.dout.data_ptr() != drawn.dout.data_ptr()
    changed = drawn.replace(dout=torch.zeros_like(drawn.dout))
    assert not changed.dout.any()
    assert changed.dlse is drawn.dlse


@pytest.mark.parametrize(
    ("problem", "changes", "message"),
    [
        (BACKWARD, {"dout": None}, "attention in fp16 needs its dout"),
        (FORWARD, {"dout": torch.zeros(2, 4, 5, 3)}, "attention in fp16 has no dout"),
        (BACKWARD, {"dlse": torch.zeros(2, 4, 5)}, "attention in fp16 has no dlse"),
        (BACKWARD, {"dout": torch.zeros(2, 4, 5, 4)}, r"dout.shape=\(2, 4, 5, 4\), but should be"),
        (BACKWARD, {"dout": torch.zeros(2, 4, 5, 3)}, "dout.dtype=torch.float32, but should be"),
        (WITH_LSE, {"dlse": torch.zeros(2, 4, 5).half()}, "dlse.dtype=torch.float16, but should"),
    ],
)
def test_loss_tensors_that_do_not_fit_the_problem_are_rejected(problem, changes, message):
    tensors = input_tensors.draw_inputs(problem).tensors() | changes
    with pytest.raises(ProblemError, match=message):
        Inputs(problem=problem, **tensors)


def test_loss_of_a_forward_is_an_error():
    with pytest.raises(ProblemError, match="no backward, and so no loss"):
        input_tensors.draw_inputs(FORWARD).loss()


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_impossible_backward_is_rejected(changes, message):
    with pytest.raises(ProblemError, match=message):
        FORWARD.replace(**changes)


def test_softmax_has_no_backward():
    with pytest.raises(ProblemError, match="backward=True has no meaning for softmax"):
        Problem(operation="softmax", query=3, kv=4, backward=True)


def test_backward_options_are_part_of_the_id_the_json_and_the_text():
    assert BACKWARD.id != FORWARD.id != WITH_LSE.id
    assert "backward" not in FORWARD.to_json()
    assert Problem.from_json(WITH_LSE.to_json()) == WITH_LSE
    assert " backward dLSE " in str(WITH_LSE)
    captured = BACKWARD.replace(score=Spec.of("alibi"), dcaptured=True)
    assert captured.id != captured.replace(dcaptured=False).id
    assert Problem.from_json(captured.to_json()) == captured
    assert "dcaptured" not in BACKWARD.to_json()
    assert " backward dcaptured " in str(captured)
    assert not input_tensors.draw_inputs(captured).forward().problem.dcaptured

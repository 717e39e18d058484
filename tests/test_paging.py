"""Paging and sinks: fields of a Problem, and the inputs drawn for them."""

import pytest
import torch

from attncheck.core.errors import ProblemError
from attncheck.core.paged_layout import Paging
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem

PAGED = Problem(batch=3, heads=2, query=1, kv=70, paging=Paging(size=16, seed=5, shared=2))


def test_json_has_sink_and_paging_only_where_they_are_used():
    """So a Problem without them keeps the id that it had before these fields existed."""
    assert not {"sink", "paging"} & set(Problem(query=4).to_json())
    assert Problem(query=4).id == Problem.from_json(Problem(query=4).to_json()).id
    for problem in (PAGED, Problem(query=4, sink=True)):
        assert Problem.from_json(problem.to_json()) == problem


@pytest.mark.parametrize(
    "fields",
    [{"size": 0}, {"size": 2**20}, {"size": True}, {"size": 16, "seed": -1}, {"size": 16.0}],
)
def test_invalid_paging_is_rejected(fields):
    with pytest.raises(ProblemError, match="paging"):
        Paging(**fields)


@pytest.mark.parametrize("data", [{}, 3, {"size": 16, "colour": 1}])
def test_invalid_paging_in_json_is_rejected(data):
    with pytest.raises(ProblemError, match="paging"):
        Problem.from_json({"query": 4, "paging": data})


@pytest.mark.parametrize("fields", [{"sink": 1}, {"paging": 16}])
def test_sink_and_paging_of_another_type_are_rejected(fields):
    with pytest.raises(ProblemError):
        Problem(query=4, **fields)


@pytest.mark.parametrize("fields", [{"sink": True}, {"paging": Paging(size=16)}])
def test_softmax_has_neither_sink_nor_paging(fields):
    with pytest.raises(ProblemError, match="no meaning"):
        Problem(operation="softmax", query=4, **fields)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_sequences_that_share_pages_have_equal_keys_and_values_there(dtype):
    inputs = draw_inputs(PAGED.replace(dtype=dtype))
    for tensor in (inputs.k, inputs.v):
        stored = tensor.view(torch.uint8)
        assert torch.equal(stored[0, :, :32], stored[2, :, :32])
        assert not torch.equal(stored[0, :, 32:], stored[2, :, 32:])
    if inputs.descale is not None:
        assert torch.equal(inputs.descale.k[0], inputs.descale.k[2])


def test_sink_has_one_fp32_logit_per_head_in_every_dtype():
    problem = Problem(heads=3, query=5, kv=9, sink=True)
    sinks = {
        dtype: draw_inputs(problem.replace(dtype=dtype)).sink for dtype in ("fp32", "bf16", "e4m3")
    }
    assert all(torch.equal(sink, sinks["fp32"]) for sink in sinks.values())
    assert sinks["fp32"].shape == (3,)
    assert sinks["fp32"].dtype is torch.float32
    with pytest.raises(ProblemError, match="needs its sink"):
        draw_inputs(problem.replace(sink=False)).replace(problem=problem)
    with pytest.raises(ProblemError, match=r"sink.shape"):
        draw_inputs(problem).replace(sink=torch.zeros(2))

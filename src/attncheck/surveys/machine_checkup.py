"""A checkup of this machine: its versions, and a self-test of every kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import torch

from attncheck.core.errors import AttncheckError
from attncheck.core.paged_layout import Paging
from attncheck.inputs import input_tensors
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities import named_kernels
from attncheck.subjects.capabilities.subject import Subject
from attncheck.verify.environment import (
    default_device,
    environment,
    prepare,
    replacement_assembler,
)
from attncheck.verify.executor import Execution, InProcess

# With q = 0 and V = 1 every weight is 1, and their number is a power of two: out is exactly 1 in
# every format, whatever the order of the sum; a softmax gives exactly 1/32. A kernel gets the
# first of these that concerns it.
_UNIFORM = Problem(heads=2, kv_heads=1, query=32, head_dim=16, distribution="zero_q")
_PROBLEMS = (
    _UNIFORM,
    _UNIFORM.replace(dtype="e4m3"),
    _UNIFORM.replace(paging=Paging(size=16)),
    Problem(operation="softmax", query=32, distribution="zero_q"),
)


def check_machine() -> dict[str, Any]:
    """Return the environment and self-tests, ready for JSON.

    Each self-test has a ``name``, whether it is ``ok``, and a ``finding`` in one line. A kernel
    that is absent on this machine is ok; its finding says why it is absent.
    """
    device = default_device()
    try:
        prepare(device)
    # The checkup goes on, because torch's own kernels can still be tested.
    except AttncheckError as error:
        ready = {"name": "triton", "ok": False, "finding": str(error)}
    else:
        how = "compiled" if device == "cuda" else "interpreted"
        ready = {"name": "triton", "ok": True, "finding": f"kernels are {how} on {device}"}
    tests = [ready, *_assembler(device)]
    tests += [
        _self_test(named_kernels.subject_named(n), device) for n in named_kernels.builtin_names()
    ]
    return {"environment": msgspec.to_builtins(environment(device)), "self_tests": tests}


def _assembler(device: str) -> list[dict[str, Any]]:
    """Return a warning if Triton's own ptxas is faulty, which affects kernels other than ours."""
    better = replacement_assembler(device)
    if better is None:
        return []
    finding = (
        "CUDA 12.8's gives some wgmma wrong operands: wrong numbers, illegal accesses. Ours do "
        f"without it; for your Triton kernels set TRITON_PTXAS_PATH={better}"
    )
    return [{"name": "ptxas", "ok": True, "finding": finding}]


def _self_test(subject: Subject, device: str) -> dict[str, Any]:
    problem = next(problem for problem in _PROBLEMS if subject.concerns(problem))
    reason = subject.absent(device) or subject.unsupported(problem, device)
    if reason:
        return {"name": subject.name, "ok": True, "finding": f"not here: {reason}"}
    result = InProcess().run(subject, _with_ones(input_tensors.draw_inputs(problem, device)))
    if not isinstance(result, Execution):
        return {"name": subject.name, "ok": False, "finding": result.message}
    softmax = problem.operation == "softmax"
    expected, shown = (1 / problem.kv, "1/32") if softmax else (1.0, "1")
    wrong = int((result.outputs.out != expected).sum())
    right = "equal scores give" if softmax else "uniform weights over V = 1 give"
    finding = f"{wrong} elements are not {shown}" if wrong else f"{right} exactly {shown}"
    return {"name": subject.name, "ok": wrong == 0, "finding": finding}


def _with_ones(inputs: Inputs) -> Inputs:
    """Return the inputs with V = 1, in fp8 with a descale of 1."""
    descale = inputs.descale
    if descale is not None:
        descale = dataclasses.replace(descale, v=torch.ones_like(descale.v))
    return inputs.replace(v=torch.ones_like(inputs.v), descale=descale)

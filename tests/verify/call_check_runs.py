"""Runs one call check on a small Problem, for the tests of memory and determinism checks."""

import pytest

from attncheck.core.errors import InterpreterUnavailable
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.kernels import interpreter
from attncheck.subjects.load import load_subject
from attncheck.verify.call_checks import CHECKS
from attncheck.verify.run_case import run_case

SMALL = Problem(
    batch=2, heads=4, kv_heads=2, query=5, kv=7, head_dim=6, value_dim=3, mask=Spec.of("causal")
)
CORRECT_KERNELS = [
    "ideal",
    "sdpa-math",
    "sdpa-flash",
    "flex",
    "triton-flash2",
    "triton-varlen",
    "triton-decode",
]


def require_interpreter(kernel):
    """Skip if this process imported Triton to compile for a GPU: it cannot interpret any more."""
    if kernel.startswith("triton-"):
        try:
            interpreter.enable()
        except InterpreterUnavailable:
            pytest.skip("this process compiles for its GPU")


def run_check(kernel, question, problem=SMALL, device="cpu", **parameters):
    """The Record of a call check; a parameter that is not passed has its smallest value."""
    subject = load_subject(kernel) if isinstance(kernel, str) else kernel
    smallest = {name: of[0] for name, of in CHECKS[question].allowed(problem).items()}
    case = Case(problem=problem, question=question, parameters=smallest | parameters)
    return run_case(subject, case, device=device)

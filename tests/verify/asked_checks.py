"""A check asked of a kernel on a small Problem, as tests of memory and of bits ask it."""

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
RIGHT = [
    "ideal",
    "sdpa-math",
    "sdpa-flash",
    "flex",
    "triton-flash2",
    "triton-varlen",
    "triton-decode",
]


def ready(kernel):
    """Skip where Triton was imported in this process to compile for a GPU."""
    if kernel.startswith("triton-"):
        try:
            interpreter.enable()
        except InterpreterUnavailable:
            pytest.skip("this process compiles for its GPU")


def ask(kernel, question, problem=SMALL, **numbers):
    subject = load_subject(kernel) if isinstance(kernel, str) else kernel
    smallest = {name: of[0] for name, of in CHECKS[question].allowed(problem).items()}
    case = Case(problem=problem, question=question, parameters=smallest | numbers)
    return run_case(subject, case, device="cpu")

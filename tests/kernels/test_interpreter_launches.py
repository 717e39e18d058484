"""Enabling the interpreter's repairs, and the state of Triton after a launch."""

# ruff: noqa: N803  # Triton: constexprs in capitals

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.number_formats import cast

from attncheck.core.errors import InterpreterUnavailable
from attncheck.kernels import interpreter


@triton.jit
def faulty_kernel(source, target, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 0, "planted")


@triton.jit
def count_kernel(source, target, steps):
    total = 0.0
    for i in range(tl.load(steps)):
        total += tl.load(source + i)
    tl.store(target, total)


def test_launch_works_after_an_exception_in_a_kernel():
    cast(torch.ones(4), "bf16")  # the first launch of a process changes triton's modules
    before = dict(vars(tl)), dict(vars(tl.tensor)), dict(vars(tl.core))
    with pytest.raises(Exception, match="planted"):
        faulty_kernel[(1,)](torch.zeros(4), torch.zeros(4), 4)
    assert (dict(vars(tl)), dict(vars(tl.tensor)), dict(vars(tl.core))) == before
    assert cast(torch.ones(4), "bf16").tolist() == [1.0] * 4
    assert (dict(vars(tl)), dict(vars(tl.tensor)), dict(vars(tl.core))) == before


def test_loop_bound_may_be_loaded_from_memory():
    target = torch.zeros(1)
    count_kernel[(1,)](torch.arange(8.0), target, torch.tensor([5], dtype=torch.int32))
    assert target.item() == 10.0


def test_enabling_twice_changes_nothing():
    interp = sys.modules["triton.runtime.interpreter"]
    before = interp.InterpreterBuilder.create_dot, interp.GridExecutor.__call__
    interpreter.enable()
    assert (interp.InterpreterBuilder.create_dot, interp.GridExecutor.__call__) == before
    assert interpreter.enabled()
    assert len(interpreter.repairs()) == len(set(interpreter.repairs())) == 5


def fresh_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, check=False
    )


def test_enabling_after_triton_was_imported_for_compilation_raises():
    done = fresh_process(
        "import os, triton\n"
        "from attncheck.kernels import interpreter\n"
        "assert not interpreter.enabled() and interpreter.repairs() == ()\n"
        "try:\n    interpreter.enable()\n"
        "except interpreter.InterpreterUnavailable as error:\n    print(error)\n"
        "assert 'TRITON_INTERPRET' not in os.environ and not interpreter.enabled()\n"
    )
    assert "set TRITON_INTERPRET=1" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_enabling_names_what_triton_lacks_and_patches_nothing():
    done = fresh_process(
        "import triton, triton.runtime.interpreter as interp\n"
        "from attncheck.kernels import interpreter\n"
        "convert = interp._convert_float\n"
        "del interp.ReduceOps.min_max\n"
        "try:\n    interpreter.enable()\n"
        "except interpreter.InterpreterUnavailable as error:\n    print(error)\n"
        "assert interp._convert_float is convert and not interpreter.enabled()\n",
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stderr
    for part in ("ReduceOps.min_max", "reductions", triton.__version__):
        assert part in done.stdout


def test_cuda_is_refused_in_the_interpreter():
    """Otherwise results of the interpreter would count as the GPU's."""
    from attncheck.kernels.compilation import prepare_triton

    with pytest.raises(InterpreterUnavailable, match="without TRITON_INTERPRET"):
        prepare_triton("cuda")
    code = (
        "from attncheck.kernels.compilation import prepare_triton\n"
        "try: prepare_triton('cuda')\n"
        "except Exception as error: print(type(error).__name__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "InterpreterUnavailable", run.stderr

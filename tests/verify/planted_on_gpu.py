"""Planted faults: a kernel that harms its GPU in a way that the query length selects."""

import contextlib

import torch
import triton
import triton.language as tl

from attncheck.core.outputs import Outputs
from attncheck.subjects.ideal import Ideal

RIGHT = 2


@triton.jit
def _far_away(pointer, distance):
    tl.store(pointer + distance, 1.0)


@triton.jit
def _spin(pointer):
    while tl.load(pointer, volatile=True) == 0.0:
        pass


def _writes_far_away(q):
    _far_away[(1,)](q, 1 << 44)


def spins(q, right):
    _spin[(1,)](torch.zeros(1, device=q.device))
    return right


def illegal(q, right):
    _writes_far_away(q)
    return right


def illegal_and_swallowed(q, right):
    """Swallows the CUDA error, and returns the right numbers."""
    _writes_far_away(q)
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    return right


def illegal_on_another_stream(q, right):
    """Returns before the fault has happened: without synchronising it would hit the next Case."""
    with torch.cuda.stream(torch.cuda.Stream()):
        _writes_far_away(q)
    return right


def takes_all(q, right):
    kept = [torch.empty(1 << 42, dtype=torch.uint8, device=q.device)]
    return right + kept[0][0]


def mutation(q, right):
    q.view(torch.uint8).view(-1)[0] ^= 1
    return right


FAULTS = dict(
    enumerate(
        (
            spins,
            illegal,
            illegal_and_swallowed,
            illegal_on_another_stream,
            takes_all,
            mutation,
        ),
        start=RIGHT + 1,
    )
)


class Planted(Ideal):
    """Right except for the fault."""

    name, summary = "planted on a GPU", "right but for the fault"

    def prepare(self, inputs):
        call, fault = super().prepare(inputs), FAULTS.get(inputs.problem.query)

        def spoiled():
            right = call()
            return right if fault is None else Outputs(fault(inputs.q, right.out), right.lse)

        return spoiled

"""Can attncheck work on this machine?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from attncheck import inputs as inputs_room
from attncheck.errors import AttncheckError
from attncheck.examine.environment import default_device, environment, prepare
from attncheck.examine.executor import Execution, InProcess
from attncheck.problem import Problem
from attncheck.subjects import builtin

if TYPE_CHECKING:
    from attncheck.subjects.contract import Subject

__all__ = ["checkup"]

# With q = 0 and V = 1 every weight is 1 and a power of two of them is summed: out is exactly 1 in
# every format, whatever the order of the sum.
_PROBLEM = Problem(heads=2, kv_heads=1, query=32, head_dim=16, distribution="zero_q")


def checkup() -> dict[str, Any]:
    """Environment and self-tests, as JSON.

    Each self-test has a ``name``, whether it is ``ok``, and a ``finding`` in one line. A kernel
    that is absent here is ok: it says why.
    """
    device = default_device()
    try:
        prepare(device)
    except AttncheckError as error:
        ready = {"name": "triton", "ok": False, "finding": str(error)}
    else:
        how = "compiled" if device == "cuda" else "interpreted"
        ready = {"name": "triton", "ok": True, "finding": f"kernels are {how} on {device}"}
    tests = [ready, *(_self_test(builtin.subject_named(n), device) for n in builtin.names())]
    return {"environment": msgspec.to_builtins(environment(device)), "self_tests": tests}


def _self_test(subject: Subject, device: str) -> dict[str, Any]:
    reason = subject.absent(device) or subject.unsupported(_PROBLEM, device)
    if reason:
        return {"name": subject.name, "ok": True, "finding": f"not here: {reason}"}
    drawn = inputs_room.draw(_PROBLEM, device)
    result = InProcess().run(subject, drawn.replace(v=drawn.v.new_ones(drawn.v.shape)))
    if not isinstance(result, Execution):
        return {"name": subject.name, "ok": False, "finding": result.message}
    wrong = int((result.outputs.out != 1).sum())
    finding = (
        f"{wrong} elements are not 1" if wrong else "uniform weights over V = 1 give exactly 1"
    )
    return {"name": subject.name, "ok": wrong == 0, "finding": finding}

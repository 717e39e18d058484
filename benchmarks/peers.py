"""The rules by which other projects accept an attention kernel: more than the package's.

=================  ===============================================================================
torch              torch.testing.assert_close's defaults by dtype
gpucheck           Akasxh/gpucheck, src/gpucheck/assertions/tolerances.py, _DEFAULT_TOLERANCES
3×                 that of flash-attention's tests with softcap
ε·Σp|v|            uxlfoundation/oneDNN, tests/benchdnn/sdpa/sdpa.cpp, setup_cmp: the floor of an
                   element alone (ε the output's; e4m3's where all inputs are fp8)
oneDNN             the same or a relative error of 8 (1 + n) ε, as the file has it
=================  ===============================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.formats import FORMATS
from attncheck.faults.peer_rules import (
    ALLCLOSE,
    GPUCHECK,
    TORCH,
    PeerReference,
    elementwise_rule,
    mean_rule,
    times_rule,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from attncheck.core.outputs import Outputs

__all__ = ["PEERS", "PeerReference"]


def _epsilon(reference: PeerReference) -> float:
    formats = reference.inputs.problem.formats
    return 2 * (FORMATS["e4m3"] if formats.scaled else formats.output).unit_roundoff


def _floor(got: Outputs, reference: PeerReference) -> torch.Tensor:
    error = (got.out.double() - reference.truth.out).abs()
    return error <= _epsilon(reference) * reference.magnitude


def _condition(got: Outputs, reference: PeerReference) -> bool:
    return bool(_floor(got, reference).all())


def _onednn(got: Outputs, reference: PeerReference) -> bool:
    output = reference.inputs.problem.formats.output
    relative = 8 * (1 + reference.inputs.problem.kv) * 2 * output.unit_roundoff
    near = (got.out.double() - reference.truth.out).abs() <= relative * reference.truth.out.abs()
    return bool((near | _floor(got, reference)).all())


PEERS: dict[str, Callable[[Outputs, PeerReference], bool]] = {
    "allclose(1e-2)": elementwise_rule(ALLCLOSE),
    "torch": elementwise_rule(TORCH),
    "gpucheck": elementwise_rule(GPUCHECK),
    "2×": times_rule(2.0),
    "3×": times_rule(3.0),
    "1.1× mean": mean_rule,
    "ε·Σp|v|": _condition,
    "oneDNN": _onednn,
}
"""Of out, and of LSE where a rule compares it."""

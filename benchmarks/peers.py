"""The rules by which other projects accept an attention kernel: the package's, and three more.

=================  ===============================================================================
torch              torch.testing.assert_close's defaults by dtype
gpucheck           Akasxh/gpucheck, src/gpucheck/assertions/tolerances.py, _DEFAULT_TOLERANCES
3×                 flash-attention's tests with softcap
ε·Σp|v|            uxlfoundation/oneDNN, tests/benchdnn/sdpa/sdpa.cpp, setup_cmp: only the floor of
                   an element (ε is the output's; e4m3's where all inputs are fp8)
oneDNN             that floor or a relative error of 8 (1 + n) ε, as in the file
=================  ===============================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.formats import FORMATS
from attncheck.faults.peer_rules import RULES, PeerReference, times_rule

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
    "allclose(1e-2)": RULES["allclose(1e-2)"].forward,
    "torch": RULES["torch"].forward,
    "gpucheck": RULES["gpucheck"].forward,
    "2×": times_rule(2.0),
    "3×": times_rule(3.0),
    "1.1× mean": RULES["1.1× mean"].forward,
    "ε·Σp|v|": _condition,
    "oneDNN": _onednn,
}
"""Whether each rule accepts out, and LSE if the rule compares it."""

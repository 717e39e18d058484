"""The rules by which other projects accept an attention kernel: ``attncheck.faults.peers``'s, more.

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

from attncheck.faults.peers import ALLCLOSE, Given, elementwise, mean, times
from attncheck.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from attncheck.outputs import Outputs

__all__ = ["PEERS", "TORCH", "Given"]

TORCH = {"fp32": (1e-5, 1.3e-6), "fp16": (1e-5, 1e-3), "bf16": (1e-5, 1.6e-2)}
_GPUCHECK = {"fp32": (1e-4, 1e-4), "fp16": (1e-2, 1e-2), "bf16": (5e-2, 5e-2)}


def _epsilon(given: Given) -> float:
    formats = given.inputs.problem.formats
    return 2 * (FORMATS["e4m3"] if formats.scaled else formats.output).unit_roundoff


def _floor(got: Outputs, given: Given) -> torch.Tensor:
    error = (got.out.double() - given.truth.out).abs()
    return error <= _epsilon(given) * given.magnitude


def _condition(got: Outputs, given: Given) -> bool:
    return bool(_floor(got, given).all())


def _onednn(got: Outputs, given: Given) -> bool:
    output = given.inputs.problem.formats.output
    relative = 8 * (1 + given.inputs.problem.kv) * 2 * output.unit_roundoff
    near = (got.out.double() - given.truth.out).abs() <= relative * given.truth.out.abs()
    return bool((near | _floor(got, given)).all())


PEERS: dict[str, Callable[[Outputs, Given], bool]] = {
    "allclose(1e-2)": elementwise(ALLCLOSE),
    "torch": elementwise(TORCH),
    "gpucheck": elementwise(_GPUCHECK),
    "2×": times(2.0),
    "3×": times(3.0),
    "1.1× mean": mean,
    "ε·Σp|v|": _condition,
    "oneDNN": _onednn,
}

"""What is known of a Case whatever the kernel: inputs, truth, floor, ideal kernels' errors."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attncheck import inputs as inputs_room
from attncheck import oracles
from attncheck.judge.floor import rounding_floor
from attncheck.judge.metrics import errors
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    import torch

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Case
    from attncheck.subjects.contract import Tiling

__all__ = ["Evidence"]


class Evidence:
    """Drawn and computed once per Case, when first asked for, and shared by all its kernels.

    Attributes:
        case: The Case.
        device: ``cpu`` or ``cuda``, where kernels run and the truth is computed.
    """

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.device = device
        self._ideal_rmse: dict[Tiling, float] = {}

    def establish(self) -> None:
        """Compute inputs, truth and floor now, so that nothing a kernel does can change them."""
        _ = self.inputs, self.truth, self.floor_rmse, self.input_rmse
        self.__dict__.pop("_originals", None)  # many gigabytes, and needed no more

    @cached_property
    def _originals(self) -> Inputs:
        return inputs_room.originals(self.case.problem).to(self.device)

    @cached_property
    def inputs(self) -> Inputs:
        """The tensors that the kernel and the oracle read."""
        return inputs_room.rounded(self._originals, self.case.problem)

    @cached_property
    def truth(self) -> Outputs:
        """The exact result in float64: out and LSE."""
        return oracles.truth(self.inputs)

    @cached_property
    def input_rmse(self) -> float:
        """RMSE between the exact results on the inputs as stored and as drawn.

        What rounding the inputs costs, whatever the kernel. The mask is the same in both, so the
        same rows see a key.
        """
        drawn = oracles.truth(self._originals).out
        return errors(self.truth.out, drawn, self.alive[..., None]).rmse

    @cached_property
    def alive(self) -> torch.Tensor:
        """Rows that see a key, ``(batch, heads, query)`` bool."""
        import torch

        lse = self.truth.lse
        assert lse is not None, "the oracle always gives LSE"
        return ~torch.isneginf(lse)

    @cached_property
    def floor_rmse(self) -> float:
        """RMSE of the truth correctly rounded to the output format."""
        output = self.case.problem.formats.output
        return rounding_floor(self.truth.out, self.alive[..., None], output)

    def ideal_rmse(self, tiling: Tiling) -> float:
        """RMSE of the ideal kernel at ``tiling``."""
        if tiling not in self._ideal_rmse:
            out = Ideal(tiling).run(self.inputs).out
            rmse = errors(out, self.truth.out, self.alive[..., None]).rmse
            self._ideal_rmse[tiling] = rmse
        return self._ideal_rmse[tiling]

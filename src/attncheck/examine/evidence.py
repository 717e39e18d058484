"""What is known of a Case whatever the kernel: inputs, truth, bounds, ideal kernels' outputs."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attncheck import inputs as inputs_room
from attncheck import oracles, probes
from attncheck.distributions import distribution_named
from attncheck.errors import TraceError
from attncheck.formats import FORMATS
from attncheck.judge.floor import rounding_floor
from attncheck.judge.metrics import errors
from attncheck.subjects.contract import Tiling
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from attncheck.conditions import Conditions
    from attncheck.examine.captured_reads import CapturedReads
    from attncheck.inputs import Inputs
    from attncheck.judge.allowance import Allowance
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judgement import BlindSpot
    from attncheck.mods.expression import Expression
    from attncheck.mods.running_error import RunningError
    from attncheck.outputs import Outputs
    from attncheck.problem import Case, Problem
    from attncheck.tensor_names import TensorName

__all__ = ["Evidence", "analysis", "ensemble_tilings"]

# Of a lazy maximum, in log2 units: FlashAttention-4's.
_LAZY = 8.0


class Evidence:
    """Drawn and computed once per Case, when first asked for, and shared by all its kernels.

    Attributes:
        case: The Case; of a probe's the inputs are the probe's.
        device: ``cpu`` or ``cuda``, where kernels run and the truth is computed.

    Args:
        case: The Case.
        device: Where.
        inputs: What is read, where it is not drawn: tensors that were given, or a relation's.
    """

    def __init__(self, case: Case, device: str, inputs: Inputs | None = None) -> None:
        self.case = case
        self.device = device
        if inputs is not None:
            self.__dict__["inputs"] = inputs
        self._allowances: dict[Arithmetic, Allowance] = {}
        self._blind_spots: dict[tuple[Arithmetic, bool], BlindSpot | None] = {}
        self._ideals: dict[tuple[Tiling, bool], Outputs] = {}
        self._ideal_rmse: dict[Tiling, float] = {}
        self._ideal_gradients: dict[Tiling, dict[TensorName, float]] = {}

    def establish(self, *, yardsticks: bool = True) -> None:
        """Compute inputs and truth now, so that nothing a kernel does can change them.

        With ``yardsticks`` also what its errors are compared with.
        """
        _ = self.inputs, self.truth
        if yardsticks:
            _ = self.floor_rmse, self.input_rmse, self.gradient_floors
        self.__dict__.pop("_originals", None)  # many gigabytes, and needed no more

    @cached_property
    def _originals(self) -> Inputs:
        return inputs_room.originals(self.case.problem).to(self.device)

    @property
    def _probes(self) -> bool:
        return self.case.question in probes.PROBES

    @cached_property
    def inputs(self) -> Inputs:
        """The tensors that the kernel and the oracle read."""
        if self._probes:
            return probes.inputs(self.case, self.device)
        return inputs_room.rounded(self._originals, self.case.problem)

    @cached_property
    def truth(self) -> Outputs:
        """The exact result in float64: out and LSE, and gradients of a backward."""
        return oracles.truth(self.inputs)

    @cached_property
    def input_rmse(self) -> float:
        """RMSE between the exact results on the inputs as stored and as drawn.

        What rounding the inputs costs, whatever the kernel. The mask is the same in both, so the
        same rows see a key. A probe's inputs are numbers of its dtype: nothing.
        """
        if self._probes:
            return 0.0
        drawn = oracles.truth(self._originals.forward()).out
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

    @cached_property
    def gradient_floors(self) -> dict[TensorName, float]:
        """RMSE of each exact gradient correctly rounded to its format; none without a backward."""
        storage, fp32 = self.case.problem.formats.storage, FORMATS["fp32"]
        of_keys = ("dq", "dk", "dv")
        return {
            name: rounding_floor(exact, self.touched(name), storage if name in of_keys else fp32)
            for name, exact in self.truth.gradients().items()
        }

    def touched(self, gradient: TensorName) -> torch.Tensor:
        """Where ``gradient`` is not 0 by definition, bool, broadcastable to its shape.

        Of dq in rows that see a key, of dk and dv of keys that some row sees, of dcaptured of
        numbers that are read there.
        """
        import torch

        if gradient == "dcaptured":
            return self.reads.numbers
        if gradient == "dsink":
            return torch.ones((), dtype=torch.bool, device=self.inputs.device)
        return (self.alive if gradient == "dq" else self._seen_keys)[..., None]

    @cached_property
    def _seen_keys(self) -> torch.Tensor:
        """Keys that some row sees, ``(batch, kv_heads, kv)`` bool."""
        import torch

        from attncheck.oracles.conditions import blocks, conditions

        problem, device = self.case.problem, self.inputs.device
        shape = (problem.batch * problem.heads, problem.kv)
        seen = torch.zeros(shape, dtype=torch.bool, device=device)
        for rows in blocks(problem, device):
            found = conditions(self.inputs, self.truth, rows).seen[..., : problem.kv]
            seen[rows.heads.start : rows.heads.stop] |= found.any(1)
        return seen.view(problem.batch, problem.kv_heads, problem.group, problem.kv).any(2)

    def allowance(self, arithmetic: Arithmetic) -> Allowance:
        """What ``examine.allowances`` allows a kernel of this arithmetic."""
        from attncheck.examine.allowances import allowance

        if arithmetic not in self._allowances:
            self._allowances[arithmetic] = allowance(self, arithmetic)
        return self._allowances[arithmetic]

    def blind_spot(self, arithmetic: Arithmetic, *, exposes_lse: bool) -> BlindSpot | None:
        """What this Case could not have shown of a kernel of this arithmetic."""
        from attncheck.judge.blind_spot import blind_spot
        from attncheck.oracles.conditions import slopes

        asked = arithmetic, exposes_lse
        if asked not in self._blind_spots:
            self._blind_spots[asked] = blind_spot(
                self.sampled_conditions(),
                self.allowance(arithmetic),
                generic=self.generic,
                exposes_lse=exposes_lse,
                slopes=lambda known: slopes(self.inputs, known),
            )
        return self._blind_spots[asked]

    @property
    def generic(self) -> bool:
        """Whether the inputs are drawn without structure, so that roundings are independent."""
        return not self._probes and distribution_named(self.case.problem.distribution).generic

    def sampled_conditions(self) -> Iterator[Conditions]:
        """Conditions of the rows that are examined more closely, computed as they are asked for.

        In the order of an Allowance's samples. They are large: hold one at a time.
        """
        from attncheck.oracles.conditions import conditions, sampled

        for rows in sampled(self.case.problem, self.inputs.device):
            yield conditions(self.inputs, self.truth, rows)

    def running_error(self, arithmetic: Arithmetic) -> RunningError | None:
        """The analysis of the score mod in this arithmetic; None where it cannot be traced."""
        return None if self._traced_score is None else analysis(self._traced_score, arithmetic)

    def slope_error(self, arithmetic: Arithmetic) -> RunningError | None:
        """The same of the score mod's derivative."""
        return None if self._traced_slope is None else analysis(self._traced_slope, arithmetic)

    @cached_property
    def reads(self) -> CapturedReads:
        """What the score mod reads of captured tensors."""
        from attncheck.examine.captured_reads import CapturedReads

        return CapturedReads(self)

    @cached_property
    def _traced_score(self) -> Expression | None:
        from attncheck.subjects.traced import traced_score

        try:
            return traced_score(self.case.problem, self.device)
        except TraceError:
            return None

    @cached_property
    def _traced_slope(self) -> Expression | None:
        from attncheck.mods.derivative import derivative

        try:
            return derivative(self.case.problem.score_mod(self.device), self.device)
        except TraceError:
            return None

    def ideal_outputs(self, tiling: Tiling, *, truncates: bool = False) -> Outputs:
        """What the ideal kernel gives at ``tiling``.

        Args:
            tiling: How it walks over the keys.
            truncates: Whether it truncates tf32 operands, as tensor cores do.
        """
        truncates = truncates and self.case.problem.formats.products.name == "tf32"
        asked = tiling, truncates
        if asked not in self._ideals:
            kernel = Ideal(tiling, tf32="truncate") if truncates else Ideal(tiling)
            self._ideals[asked] = kernel.run(self.inputs.forward())
        return self._ideals[asked]

    def ensemble(self, *, truncates: bool = False) -> Iterator[Outputs]:
        """What ideal kernels of several tilings give, one after the other."""
        for tiling in ensemble_tilings(self.case.problem):
            yield self.ideal_outputs(tiling, truncates=truncates)

    def ideal_rmse(self, tiling: Tiling) -> float:
        """RMSE of the ideal kernel at ``tiling``."""
        if tiling not in self._ideal_rmse:
            out = self.ideal_outputs(tiling).out
            rmse = errors(out, self.truth.out, self.alive[..., None]).rmse
            self._ideal_rmse[tiling] = rmse
        return self._ideal_rmse[tiling]

    def ideal_gradients(self, tiling: Tiling) -> dict[TensorName, float]:
        """RMSE of each gradient of the ideal kernel at ``tiling``, after its own forward."""
        if tiling not in self._ideal_gradients:
            exact = self.truth.gradients()
            self._ideal_gradients[tiling] = {
                name: errors(gradient, exact[name], self.touched(name)).rmse
                for name, gradient in Ideal(tiling).run(self.inputs).gradients().items()
            }
        return self._ideal_gradients[tiling]


def analysis(expression: Expression, arithmetic: Arithmetic) -> RunningError:
    """The analysis of what a kernel of this arithmetic evaluates of scores."""
    from attncheck.mods.running_error import RunningError
    from attncheck.mods.to_interval import KERNEL_FP32, TORCH_FP64

    fp64 = arithmetic.computes.name == "fp64"
    return RunningError(
        expression, arithmetic.tanh_error, arithmetic=TORCH_FP64 if fp64 else KERNEL_FP32
    )


def ensemble_tilings(problem: Problem) -> tuple[Tiling, ...]:
    """Four tilings of right kernels: large and small tiles, from either end, a lazy maximum.

    A softmax has no tiles. In fp8 no maximum is lazy: P would lose its scale to it.
    """
    first = Tiling(block_query=128, block_kv=64)
    if problem.operation == "softmax":
        return (first,)
    lazy = 0.0 if problem.formats.weights.saturates else _LAZY
    return (
        first,
        Tiling(block_query=64, block_kv=128),
        Tiling(block_query=64, block_kv=32, reverse=True),
        Tiling(block_query=32, block_kv=16, lazy_rescale=lazy),
    )

"""Builds the evidence on a Case: computes each costly part once, on first use, for all kernels."""

from __future__ import annotations

import functools
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from attncheck import oracles, probes
from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import FULL, NONE
from attncheck.inputs import input_tensors
from attncheck.inputs.distributions import distribution_named
from attncheck.judge.blind_spot import blind_spot
from attncheck.judge.error_measures import measure_errors, rounding_floor
from attncheck.oracles.row_conditions import (
    all_rows,
    compute_conditions,
    sampled_rows,
    score_slopes,
)
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.allowances import (
    allowances,
    bound_deciding_rows,
    numbers_read,
    totals_of_rows,
)
from attncheck.verify.evidence import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from attncheck.core.conditions import Conditions, Rows, RowTotals
    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.core.judgement import BlindSpot
    from attncheck.core.outputs import Outputs
    from attncheck.core.tensor_names import TensorName
    from attncheck.inputs.distributions import Distribution
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Case, Problem
    from attncheck.judge.allowance import Allowance
    from attncheck.judge.blind_spot import CutSums

# A lazy maximum is raised only if a score exceeds it by this, in log2 units (FlashAttention-4's).
_LAZY = 8.0

# Rows of q and k up to which float64 numbers are cached: 768 MiB at 128 dims, 1.5 GiB on a GPU.
_MOST_CACHED_ROWS = {"cpu": 1 << 18, "cuda": 1 << 19}


class EvidenceBuilder:
    """Computes inputs, exact result and error allowances of a Case on first use, and caches them.

    Args:
        case: The Case; a probe's has the probe's inputs.
        device: ``cpu`` or ``cuda``, where kernels run.
        place: ``cpu`` or ``cuda``, for the exact result and the judge; by default ``device``.
        inputs: A user's or a relation's tensors, in place of drawn ones.
        truth: The exact result, if it is already known.
        expected: Arithmetics of the kernels to be judged: bounds for several at once cost little
            more than for one.
        tilings: Tilings of those kernels, at which the ideal kernel is compared with them.
        meanwhile: Called before kernels run, while a GPU works on the evidence.
    """

    def __init__(
        self,
        case: Case,
        device: str,
        inputs: Inputs | None = None,
        truth: Outputs | None = None,
        expected: Sequence[Arithmetic] = (),
        tilings: Sequence[Tiling] = (),
        place: str = "",
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        self.case, self.device, self.expected, self.tilings = case, device, expected, tilings
        self._place, self._meanwhile = place or device, meanwhile
        # A cached_property stores its value in __dict__; a value set here is never computed.
        if inputs is not None:
            self.__dict__["inputs"] = inputs
        if truth is not None:
            self.__dict__["truth"] = truth
        # Cached by arithmetic or tiling, and shared by kernels that have the same.
        self._allowances: dict[Arithmetic, Allowance] = {}
        self._blind_spots: dict[tuple[Arithmetic, bool], BlindSpot | None] = {}
        self._cut_sums: CutSums = {}
        self._ideals: dict[tuple[Tiling, bool], Outputs] = {}
        self._ideal_rmse: dict[Tiling, float] = {}
        self._ideal_gradients: dict[Tiling, dict[TensorName, float]] = {}

    @cached_property
    def evidence(self) -> Evidence:
        """The inputs and exact result against which any kernel's outputs are judged."""
        return Evidence(case=self.case, device=self._place, inputs=self.inputs, truth=self.truth)

    def establish(self, *, reference_errors: bool = True) -> None:
        """Compute inputs and truth now, so that nothing a kernel does can change them.

        With ``reference_errors`` compute the errors that the kernel's are compared with, too.
        """
        _ = self.evidence
        if reference_errors:
            _ = self.floor_rmse, self.input_rmse, self.gradient_floors
        self.__dict__.pop("_originals", None)  # It takes gigabytes and is not needed again.
        # A GPU computes these while the first kernel is compiled.
        if reference_errors and self.device == "cuda":
            for tiling in self.tilings:
                self.ideal_outputs(tiling)
            for arithmetic in self.expected:
                self._allowance(arithmetic)
        self._meanwhile()

    @cached_property
    def _originals(self) -> Inputs:
        problem = self.case.problem
        exact = problem.replace(dtype="fp64")
        # Numbers do not depend on mask, score mod and dtype, and drawing them takes a second.
        plain = exact.replace(mask=FULL, score=NONE, dcaptured=False)
        rows = problem.batch * problem.heads * (problem.query + problem.kv)
        is_cached = problem.operation == "attention" and rows <= _MOST_CACHED_ROWS[self._place]
        draw = _draw_cached if is_cached else _draw_cached.__wrapped__
        numbers = draw(plain, distribution_named(problem.distribution), self._place)
        return numbers.replace(problem=exact)

    @cached_property
    def inputs(self) -> Inputs:
        """The input tensors of the kernel and the oracle."""
        if self.case.question in probes.PROBES:
            return probes.inputs(self.case, self._place)
        return input_tensors.round_inputs(self._originals, self.case.problem)

    @cached_property
    def truth(self) -> Outputs:
        """The exact result in float64: out and LSE, and gradients of a backward."""
        return oracles.truth(self.inputs)

    @cached_property
    def input_rmse(self) -> float:
        """RMSE between the exact results on the inputs as stored and as drawn.

        This is the error due to rounding the inputs, for any kernel. The mask is the same in both,
        so the same rows see a key. It is 0 for probes, whose inputs are numbers of the dtype.
        """
        if self.case.question in probes.PROBES:
            return 0.0
        # Gradients are left out, because their input error is not reported.
        unrounded = oracles.truth(self._originals.forward()).out
        return measure_errors(self.truth.out, unrounded, self.alive[..., None]).rmse

    @cached_property
    def alive(self) -> Tensor:
        """Rows that see a key, ``(batch, heads, query)`` bool."""
        return self.evidence.alive

    @cached_property
    def floor_rmse(self) -> float:
        """RMSE of the truth correctly rounded to the output format."""
        output = self.case.problem.formats.output
        return rounding_floor(self.truth.out, self.alive[..., None], output)

    @cached_property
    def gradient_floors(self) -> dict[TensorName, float]:
        """RMSE of each exact gradient correctly rounded to its format; empty without a backward."""
        storage, fp32 = self.case.problem.formats.storage, FORMATS["fp32"]
        of_keys = ("dq", "dk", "dv")
        return {
            name: rounding_floor(exact, self.touched(name), storage if name in of_keys else fp32)
            for name, exact in self.truth.gradients().items()
        }

    def touched(self, tensor: TensorName) -> Tensor:
        """Return where a tensor does not follow from the mask, bool, broadcastable to its shape.

        These are for out, LSE and dq the rows that see a key, for dk and dv the keys that some row
        sees, and for dcaptured the numbers that are read for a visible score.
        """
        if tensor == "lse":
            return self.alive
        if tensor == "dcaptured":
            return self._numbers_read
        if tensor == "dsink":
            return torch.ones((), dtype=torch.bool, device=self.inputs.device)
        return (self.alive if tensor in {"out", "dq"} else self._seen_keys)[..., None]

    @cached_property
    def _numbers_read(self) -> Tensor:
        return numbers_read(self.evidence)

    @cached_property
    def _seen_keys(self) -> Tensor:
        """Keys that some row sees, ``(batch, kv_heads, kv)`` bool."""
        problem, device = self.case.problem, self.inputs.device
        shape = (problem.batch * problem.heads, problem.kv)
        seen = torch.zeros(shape, dtype=torch.bool, device=device)
        for rows in all_rows(problem, device):
            visible = compute_conditions(self.inputs, self.truth, rows).seen[..., : problem.kv]
            seen[rows.heads.start : rows.heads.stop] |= visible.any(1)
        return seen.view(problem.batch, problem.kv_heads, problem.group, problem.kv).any(2)

    def allowance(self, arithmetic: Arithmetic, outputs: Outputs | None = None) -> Allowance:
        """Return the error bounds of a kernel of this arithmetic, as in ``allowances.allowances``.

        With ``outputs``, only as exact as a verdict on them needs: see ``bound_deciding_rows``.
        """
        allowance = self._allowance(arithmetic)
        bound_deciding_rows(allowance, self.evidence, arithmetic, outputs)
        return allowance

    def _allowance(self, arithmetic: Arithmetic) -> Allowance:
        """Return the cached allowance, in which rows that are not sampled may have floors."""
        if arithmetic not in self._allowances:
            arithmetics = dict.fromkeys([arithmetic, *self.expected])
            new = [each for each in arithmetics if each not in self._allowances]
            allowed = allowances(self.evidence, new, self._totals, self._sampled_rows)
            self._allowances.update(zip(new, allowed, strict=True))
        return self._allowances[arithmetic]

    @cached_property
    def _totals(self) -> RowTotals | None:
        return totals_of_rows(self.evidence)

    def blind_spot(self, arithmetic: Arithmetic, *, exposes_lse: bool) -> BlindSpot | None:
        """Return the faults that this Case would not show in a kernel of this arithmetic."""
        key = arithmetic, exposes_lse
        if key not in self._blind_spots:
            # A generator, because the conditions of rows are large.
            rows = (
                (each, score_slopes(self.inputs, each) if each.has_score_mod else None)
                for each in self.sampled_conditions()
            )
            self._blind_spots[key] = blind_spot(
                rows,
                self._allowance(arithmetic),
                generic=self.evidence.generic,
                exposes_lse=exposes_lse,
                cut_sums=self._cut_sums,
            )
        return self._blind_spots[key]

    @cached_property
    def _sampled_rows(self) -> list[Rows]:
        return sampled_rows(self.case.problem, self.inputs.device)

    def sampled_conditions(self) -> Iterator[Conditions]:
        """Yield the conditions of the sampled rows, in the order of an Allowance's samples.

        They are large: hold one at a time.
        """
        for rows in self._sampled_rows:
            yield compute_conditions(self.inputs, self.truth, rows)

    def ideal_outputs(self, tiling: Tiling, *, truncates: bool = False) -> Outputs:
        """Return the outputs of the ideal kernel at ``tiling``.

        Args:
            truncates: Whether it truncates tf32 operands, as tensor cores do.
        """
        # Only tf32 operands have bits to truncate; others share one cache entry.
        truncates = truncates and self.case.problem.formats.products.name == "tf32"
        key = tiling, truncates
        if key not in self._ideals:
            kernel = Ideal(tiling, tf32="truncate" if truncates else "nearest", quick=True)
            self._ideals[key] = kernel.run(self.inputs.forward())
        return self._ideals[key]

    def other_orders(self, tiling: Tiling, *, truncates: bool) -> Iterator[Outputs]:
        """Yield the outputs of the ideal kernel at ``tiling`` with its operations in other orders.

        ``truncates`` is as in ``ideal_outputs``. Not cached, because few verdicts need them.
        """
        tf32: Literal["truncate", "nearest"] = "truncate" if truncates else "nearest"
        for sums, scale in ((True, True), (True, False), (False, True)):
            kernel = Ideal(tiling, tf32=tf32, reverse_sums=sums, scale_first=scale)
            yield kernel.run(self.inputs.forward())

    def ensemble(self, *, truncates: bool = False) -> Iterator[Outputs]:
        """Yield the outputs of ideal kernels of several tilings."""
        for tiling in ensemble_tilings(self.case.problem):
            yield self.ideal_outputs(tiling, truncates=truncates)

    def ideal_rmse(self, tiling: Tiling) -> float:
        """Return the RMSE of the ideal kernel at ``tiling``."""
        if tiling not in self._ideal_rmse:
            out = self.ideal_outputs(tiling).out
            rmse = measure_errors(out, self.truth.out, self.alive[..., None]).rmse
            self._ideal_rmse[tiling] = rmse
        return self._ideal_rmse[tiling]

    def ideal_gradients(self, tiling: Tiling) -> dict[TensorName, float]:
        """Return the RMSE of each gradient of the ideal kernel at ``tiling``, after its forward."""
        if tiling not in self._ideal_gradients:
            exact = self.truth.gradients()
            self._ideal_gradients[tiling] = {
                name: measure_errors(gradient, exact[name], self.touched(name)).rmse
                for name, gradient in Ideal(tiling).run(self.inputs).gradients().items()
            }
        return self._ideal_gradients[tiling]


@functools.lru_cache(maxsize=2)
def _draw_cached(problem: Problem, distribution: Distribution, device: str) -> Inputs:
    """Return float64 numbers on ``device``, cached and so not to be written to."""
    del distribution  # Part of the cache key, because two recordings may have the same name.
    return input_tensors.unrounded_inputs(problem, device)


def forget_numbers() -> None:
    """Drop the numbers cached for the next Problem, to free their memory."""
    _draw_cached.cache_clear()


def ensemble_tilings(problem: Problem) -> tuple[Tiling, ...]:
    """Return four tilings of right kernels: large and small, from either end, with a lazy maximum.

    A softmax has no tiles, and gets one tiling. In fp8 none is lazy, lest P lose its scale.
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

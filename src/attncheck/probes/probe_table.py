"""A probe, and all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from attncheck.core.draws import Draws
from attncheck.core.errors import ProblemError
from attncheck.inputs.problem import Allowed, Parameters, check_parameters, fits_all, no_parameters
from attncheck.mods import library
from attncheck.probes.margins import USUAL_WEIGHT_ERRORS, WeightErrors
from attncheck.probes.probe_inputs import (
    amplitudes,
    boundary_keys,
    code_by_column,
    code_by_parity,
    code_values,
    count_rounds,
    fill_orthogonal_columns,
    key_code,
    logit_factors,
    logit_out_of_range,
    store_inputs,
    zero_query_and_keys,
)
from attncheck.probes.tied_keys import check_tied_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.probes.tied_keys import Finding, Seen

__all__ = [
    "DECODE",
    "ISOLATED",
    "MEAN",
    "NEGATIVE",
    "ONES",
    "POSITIVE",
    "RAMP",
    "TWO_LEVEL",
    "Parameters",
    "Probe",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Inputs whose right answer is known beforehand, on any Problem of attention.

    All of it is pure: no kernel, no oracle. ``docs/reference/probes.md`` proves what each asks.

    Attributes:
        name: The question of a Case.
        summary: What it asks, in one line.
        fill: (Problem, parameters) → its Inputs on the CPU; the Problem is ``problem``'s.
        unable: Why there are no such inputs of a Problem, in one line; None if there are.
        allowed: The numbers that may be asked of a Problem, by name, the most telling first.
    """

    name: str
    summary: str
    fill: Callable[[Problem, Parameters], Inputs]
    unable: Callable[[Problem], str | None] = fits_all
    allowed: Callable[[Problem], Allowed] = no_parameters

    def problem(self, problem: Problem) -> Problem:
        """What is asked in place of ``problem``: without score mod, its distribution not drawn.

        Layout, mask, dtype, scale and seed stay.
        """
        if problem.operation != "attention":
            return problem
        return problem.replace(score=library.NONE, distribution="normal", dcaptured=False)

    def unfit(self, problem: Problem) -> str | None:
        """Why the probe cannot be asked of ``problem``, in one line; None if it can."""
        if problem.operation != "attention":
            return "it is about attention"
        if problem.sink:
            return "it has a sink, and counts are of keys alone"
        if problem.backward:
            return "it says nothing of gradients"
        return self.unable(problem)

    def check(self, problem: Problem, parameters: Parameters) -> None:
        """Raises ProblemError unless the probe can be asked of ``problem`` with these."""
        reason = self.unfit(problem)
        if reason is None and self.problem(problem) != problem:
            reason = "it takes no score mod and the distribution 'normal', which it does not draw"
        if reason:
            raise ProblemError(f"{self.name} cannot be asked of {problem}: {reason}.")
        check_parameters(self.name, parameters, self.allowed(problem))

    def inputs(self, problem: Problem, parameters: Parameters) -> Inputs:
        """The Inputs, on the CPU; raises ProblemError as ``check`` does."""
        self.check(problem, parameters)
        return self.fill(problem, parameters)

    def read(
        self,
        inputs: Inputs,
        outputs: Outputs,
        seen: Seen,
        *,
        errors: WeightErrors = USUAL_WEIGHT_ERRORS,
    ) -> Finding | None:
        """What is wrong by the exact rule, or None; see ``tied_keys``."""
        return check_tied_keys(inputs, outputs, seen, errors=errors)


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"round": range(count_rounds(problem))}


def _fill(problem: Problem, parameters: Parameters) -> Inputs:
    q, k = zero_query_and_keys(problem)
    fill_orthogonal_columns(q, k, 0)
    return store_inputs(
        problem, q, k, code_values(problem, key_code(problem, int(parameters["round"])))
    )


DECODE = Probe(
    name="decode",
    summary="q·k = 0 and V a code of the key index: out · n and exp(LSE) count the keys seen",
    fill=_fill,
    allowed=_allowed,
)
"""Holds for every right kernel: with all scores 0 every weight is the same power of two, exact in
every format of P, so that sums of 0s and 1s are counts; only the division and out are rounded."""


def _fill_of_ones(problem: Problem, _: Parameters) -> Inputs:
    draws = Draws(problem.seed)
    q, k = (
        torch.from_numpy(draws.normal(f"ones {name}", tuple(zeros.shape)))
        for name, zeros in zip("qk", zero_query_and_keys(problem), strict=True)
    )
    v = torch.ones((*k.shape[:3], problem.value_dim), dtype=torch.float64)
    return store_inputs(problem, q, k, v * amplitudes(problem)[..., None, None], exact=False)


ONES = Probe(
    name="ones",
    summary="random logits and V the same in every key: out is V, since weights add up to 1",
    fill=_fill_of_ones,
)


_STEP = 16
"""Keys of a level: a tile has one level or more, and a step of the recurrence one rise or more."""

_DIGIT = 8  # whole numbers below it have three bits, as e5m2 has
_FAST, _SLOW = 32, 1
"""Rises in log2 units. The levels below the highest vanish; or the maximum rises by so little at a
time that a lazy one lags behind for several tiles."""


def _levels(problem: Problem, rise: int) -> torch.Tensor:
    """Of each key. There is an odd number of levels: the next ramp has them on odd places."""
    most = _DIGIT * _DIGIT - 1 if rise == _SLOW and problem.head_dim > 1 else _DIGIT - 1
    return torch.arange(problem.kv) // _STEP % most


def _unable(problem: Problem) -> str | None:
    return logit_out_of_range(problem, _FAST * math.log(2.0), _DIGIT) or logit_out_of_range(
        problem, math.log(2.0), 1.0
    )


def _allowed_of_ramp(_: Problem) -> Mapping[str, Sequence[int]]:
    return {"rise": (_FAST, _SLOW)}


def _fill_of_ramp(problem: Problem, parameters: Parameters) -> Inputs:
    rise = int(parameters["rise"])
    level = _levels(problem, rise).double()
    q, k = zero_query_and_keys(problem)
    x, y = logit_factors(problem, rise * math.log(2.0))
    q[..., 0], k[..., 0] = y, level % _DIGIT * x
    if problem.head_dim > 1:
        q[..., 1], k[..., 1] = _DIGIT * y, level // _DIGIT * x
    fill_orthogonal_columns(q, k, 2)
    odd = torch.arange(problem.kv) // _STEP % 2 == 1
    v = code_values(problem, code_by_column(problem)) * torch.where(odd, 3.0, 1.0)[:, None]
    return store_inputs(problem, q, k, v)


RAMP = Probe(
    name="ramp",
    summary="the logit rises by `rise` log2 units every 16 keys: earlier keys are scaled down",
    fill=_fill_of_ramp,
    unable=_unable,
    allowed=_allowed_of_ramp,
)


_LOGIT = 128.0
"""exp(−128) is 0 in fp32 and exp(128) is infinite; the logits are from here to 160."""


def _unable_of_constant_logits(problem: Problem) -> str | None:
    return logit_out_of_range(problem, _LOGIT)


def _fill_of_constant_logits(sign: int, problem: Problem, _: Parameters) -> Inputs:
    q, k = zero_query_and_keys(problem)
    x, y = logit_factors(problem, _LOGIT)
    q[..., 0], k[..., 0] = x, sign * y
    fill_orthogonal_columns(q, k, 1)
    return store_inputs(problem, q, k, code_values(problem, key_code(problem)))


NEGATIVE = Probe(
    name="negative",
    summary="every logit the same, −128 or less, and V a code: the maximum starts at −∞, not 0",
    fill=partial(_fill_of_constant_logits, -1),
    unable=_unable_of_constant_logits,
)
POSITIVE = Probe(
    name="positive",
    summary="every logit the same, 128 or more, and V a code: the maximum is subtracted",
    fill=partial(_fill_of_constant_logits, 1),
    unable=_unable_of_constant_logits,
)


_APART = (8, 14)
"""Nats, or up to a quarter more. At 8 the lower level weighs 2^-11.5 to 2^-14.4: a normal number of
every format of P that is scaled as it must be, and below e4m3's smallest where it is not. At 14 the
same holds of e5m2."""


def _unable_of_two_level(problem: Problem) -> str | None:
    return logit_out_of_range(problem, _APART[0] / 2) or logit_out_of_range(problem, _APART[1] / 2)


def _allowed_of_two_level(_: Problem) -> Mapping[str, Sequence[int]]:
    return {"apart": _APART}


def _fill_of_two_level(problem: Problem, parameters: Parameters) -> Inputs:
    q, k = zero_query_and_keys(problem)
    x, y = logit_factors(problem, parameters["apart"] / 2)
    low = torch.arange(problem.kv) % 2 == 1
    q[..., 0], k[..., 0] = x, torch.where(low, -y, y).double()
    fill_orthogonal_columns(q, k, 1)
    return store_inputs(problem, q, k, code_values(problem, code_by_parity(problem)))


TWO_LEVEL = Probe(
    name="two_level",
    summary="odd keys lie `apart` nats or more below even ones, in columns of their own: how much "
    "less they weigh is the temperature",
    fill=_fill_of_two_level,
    unable=_unable_of_two_level,
    allowed=_allowed_of_two_level,
)


_APART_of_isolated = 32.0
"""Nats that the chosen key is above all others, at least."""

_LARGEST = 8  # whole numbers up to it have three bits, as e5m2 has
_KEYS = 6
"""Boundary keys that all rows share out among them, beside those at their own edges."""


def _edges(problem: Problem) -> list[int]:
    """Keys at the edges of a row's own view, relative to its index: the last seen, the next one."""
    offsets: list[int] = []
    for part in problem.mask.walk():
        if part.name in {"causal", "sliding_window", "prefix_lm"}:
            offsets += [1, 0]
        if part.name == "sliding_window":
            window = cast("int", part.values["window"])
            offsets += [-window, 1 - window]
        if part.name == "causal_bottom_right":
            offsets += [problem.kv - problem.query + 1, problem.kv - problem.query]
    return list(dict.fromkeys(offsets))


def _allowed_of_isolated(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"turn": range(len(_edges(problem)) + min(_KEYS, problem.kv))}


def _chosen(problem: Problem, turn: int) -> torch.Tensor:
    """int64 ``(batch, heads, query)``: the key that a row singles out on this turn."""
    edges, shared = _edges(problem), boundary_keys(problem)[:_KEYS]
    row = torch.arange(problem.query)
    lanes = [row + offset for offset in edges] + [torch.full_like(row, key) for key in shared]
    lane = torch.stack(lanes)
    spare = torch.tensor(shared)[row % len(shared)]
    lane = torch.where((lane >= 0) & (lane < problem.kv), lane, spare)
    pair = torch.arange(problem.batch)[:, None] + torch.arange(problem.heads)
    which = (pair[..., None] + row + turn) % len(lanes)
    return lane[which, row.expand_as(which)]


def _used_bits(problem: Problem) -> int:
    return min(max(1, (problem.kv - 1).bit_length()), problem.head_dim)


def _factor(problem: Problem) -> float:
    """The power of two that makes two keys, of which one is singled out, lie ``_APART``."""
    differ = problem.head_dim // _used_bits(problem)
    return 2.0 ** math.ceil(math.log2(_APART_of_isolated / (2 * differ * problem.scale)))


def _unable_of_isolated(problem: Problem) -> str | None:
    fmt, factor = problem.formats.storage, 3 * _factor(problem)
    if fmt.saturates or 2.0**fmt.min_exponent < factor <= fmt.max:
        return None
    return f"scale={problem.scale:g} asks for q beyond {fmt.name}"


def _fill_of_isolated(problem: Problem, parameters: Parameters) -> Inputs:
    draws, turn = Draws(problem.seed), int(parameters["turn"])
    bits = _used_bits(problem)
    shape = (problem.batch, problem.kv_heads, 1, problem.head_dim)
    flips = torch.from_numpy(draws.integers("isolated signs", shape, 2))
    k = _signs(torch.arange(problem.kv), bits, flips)
    of_head = flips.repeat_interleave(problem.group, dim=1)
    first, second = (_signs(_chosen(problem, turn + n), bits, of_head) for n in (0, 1))
    q = _factor(problem) * (2 * first + second)
    return store_inputs(problem, q, k, _values(problem, draws, bits))


def _signs(numbers: torch.Tensor, bits: int, flips: torch.Tensor) -> torch.Tensor:
    """±1 by the low ``bits`` of each number, over and over along a last axis like ``flips``'s."""
    column = torch.arange(flips.shape[-1]) % bits
    return 1.0 - 2.0 * ((numbers[..., None] >> column) & 1 ^ flips).double()


def _values(problem: Problem, draws: Draws, bits: int) -> torch.Tensor:
    """−8 … 8 times the amplitude; keys that have the same signs have the same values."""
    shape = (problem.batch, problem.kv_heads, problem.kv, problem.value_dim)
    v = torch.from_numpy(draws.integers("isolated v", shape, 2 * _LARGEST + 1)).double() - _LARGEST
    v = v[:, :, torch.arange(problem.kv) % 2**bits]
    return v * amplitudes(problem)[..., None, None]


ISOLATED = Probe(
    name="isolated",
    summary="each row singles out a key at a boundary, and a second one should that be hidden: "
    "out is that key's value",
    fill=_fill_of_isolated,
    unable=_unable_of_isolated,
    allowed=_allowed_of_isolated,
)
"""q = c(2·k₁ + k₂) with k distinct rows of signs. With d(x, y) = D − x·y, twice the signs that
differ, k₁ is above any other key x by c(2d(k₁, x) + d(k₂, x) − d(k₁, k₂)) ≥ c·d(k₁, x): the
triangle inequality. Where head_dim is too short for that many keys, keys share signs and values."""


_BELOW = 40.0
"""Nats that the other keys lie below: they weigh less than 2^-57."""

_BITS_FP8, _BITS = 13, 20
"""Of a sum of values at most: what the shortest accumulator holds, of fp8 products on Hopper and of
others; more than any output has but fp32."""


def _keys(problem: Problem) -> int:
    """The largest power of two of keys that there is."""
    return 1 << (problem.kv.bit_length() - 1)


def _unable_of_mean(problem: Problem) -> str | None:
    return logit_out_of_range(problem, _BELOW)


def _fill_of_mean(problem: Problem, _: Parameters) -> Inputs:
    q, k = zero_query_and_keys(problem)
    x, y = logit_factors(problem, _BELOW)
    q[..., 0] = x
    k[:, :, _keys(problem) :, 0] = -y
    fill_orthogonal_columns(q, k, 1)
    return store_inputs(problem, q, k, _values_of_mean(problem))


def _values_of_mean(problem: Problem) -> torch.Tensor:
    """4 … 7 times 2^-s, of three bits each; s as large as the sum's bits allow."""
    draws = Draws(problem.seed)
    shape = (problem.batch, problem.kv_heads, problem.kv, problem.value_dim)
    held = _BITS_FP8 if problem.formats.scaled else _BITS
    most = max(0, held - 3 - (_keys(problem) - 1).bit_length())
    bits, exponent = (
        torch.from_numpy(draws.integers(f"mean {name}", shape, bound)).double()
        for name, bound in (("significand", 4), ("exponent", most + 1))
    )
    return (4.0 + bits) * torch.pow(2.0, -exponent) * amplitudes(problem)[..., None, None]


MEAN = Probe(
    name="mean",
    summary="equal weights and V of as many bits as accumulators hold: rows that see 2^n keys give "
    "their mean, rounded once",
    fill=_fill_of_mean,
    unable=_unable_of_mean,
)

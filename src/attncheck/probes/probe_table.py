"""The class Probe, and the table of all probes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from attncheck.core.draws import Draws
from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import NONE
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import (
    Allowed,
    Parameters,
    Problem,
    check_parameters,
    fits_all,
    no_parameters,
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Inputs whose right result is known beforehand, for any Problem of attention.

    A probe needs no kernel and no oracle. ``docs/reference/probes.md`` proves what each shows.
    """

    name: str
    summary: str
    # (Problem, parameters) → Inputs on the CPU; the Problem comes from the method ``problem``.
    fill: Callable[[Problem, Parameters], Inputs]
    # Why a Problem has no such inputs, in one line; None if it has.
    unable: Callable[[Problem], str | None] = fits_all
    # The numbers that each parameter may have, the most informative first.
    allowed: Callable[[Problem], Allowed] = no_parameters

    def problem(self, problem: Problem) -> Problem:
        """Return ``problem`` without score mod and with the distribution "normal", never drawn.

        Layout, mask, dtype, scale and seed stay.
        """
        if problem.operation != "attention":
            return problem
        return problem.replace(score=NONE, distribution="normal", dcaptured=False)

    def unfit(self, problem: Problem) -> str | None:
        """Return why the probe does not apply to ``problem``, in one line; None if it does."""
        if problem.operation != "attention":
            return "it is about attention"
        if problem.sink:
            return "it has a sink, and counts are of keys alone"
        if problem.backward:
            return "it says nothing of gradients"
        if problem.scale <= 0:
            return f"its logits rise with q, and scale={problem.scale:g} does not"
        return self.unable(problem)

    def check(self, problem: Problem, parameters: Parameters) -> None:
        """Raise ProblemError unless the probe applies to ``problem`` with ``parameters``."""
        reason = self.unfit(problem)
        if reason is None and self.problem(problem) != problem:
            reason = "it takes no score mod and the distribution 'normal', which it does not draw"
        if reason:
            raise ProblemError(f"{self.name} cannot be asked of {problem}: {reason}.")
        check_parameters(self.name, parameters, self.allowed(problem))

    def inputs(self, problem: Problem, parameters: Parameters) -> Inputs:
        """Return the Inputs, on the CPU; raise ProblemError as ``check`` does."""
        self.check(problem, parameters)
        return self.fill(problem, parameters)


# ------------------------------------------------------------------ counts of keys


def _fill_decode(problem: Problem, parameters: Parameters) -> Inputs:
    q, k = zero_query_and_keys(problem)
    fill_orthogonal_columns(q, k, 0)
    code = key_code(problem, int(parameters["round"]))
    return store_inputs(problem, q, k, code_values(problem, code))


_DECODE = Probe(
    name="decode",
    summary="q·k = 0 and V a code of the key index: out · n and exp(LSE) count the keys seen",
    fill=_fill_decode,
    allowed=lambda problem: {"round": range(count_rounds(problem))},
)
"""It holds for every right kernel: if all scores are 0, weights are one power of two, which
is exact in every format of P, and sums of 0s and 1s are counts. Only division and out round."""


def _fill_ones(problem: Problem, _: Parameters) -> Inputs:
    draws = Draws(problem.seed)
    q, k = (
        torch.from_numpy(draws.normal(f"ones {name}", tuple(zeros.shape)))
        for name, zeros in zip("qk", zero_query_and_keys(problem), strict=True)
    )
    v = torch.ones((*k.shape[:3], problem.value_dim), dtype=torch.float64)
    return store_inputs(problem, q, k, v * amplitudes(problem)[..., None, None], exact=False)


_ONES = Probe(
    name="ones",
    summary="random logits and V the same in every key: out is V, since weights add up to 1",
    fill=_fill_ones,
)

# ------------------------------------------------------------------ levels of logits

_STEP = 16
"""Keys of a level, so that each tile has at least one level, and each step at least one rise."""

_DIGIT = 8  # Whole numbers below it have three significant bits, as e5m2 has.
_FAST, _SLOW = 32, 1
"""Rises in log2 units. With the fast one, all but the highest level vanish; with the slow one, a
lazy maximum lags behind for several tiles."""


def _fill_ramp(problem: Problem, parameters: Parameters) -> Inputs:
    rise, two_digits = int(parameters["rise"]), problem.head_dim > 1
    # With an odd number of levels, the next ramp has even levels at odd places.
    most = _DIGIT * _DIGIT - 1 if rise == _SLOW and two_digits else _DIGIT - 1
    level = (torch.arange(problem.kv) // _STEP % most).double()
    q, k = zero_query_and_keys(problem)
    x, y = logit_factors(problem, rise * math.log(2.0))
    q[..., 0], k[..., 0] = y, level % _DIGIT * x
    if two_digits:
        q[..., 1], k[..., 1] = _DIGIT * y, level // _DIGIT * x
    fill_orthogonal_columns(q, k, 2)
    odd = torch.arange(problem.kv) // _STEP % 2 == 1
    v = code_values(problem, code_by_column(problem)) * torch.where(odd, 3.0, 1.0)[:, None]
    return store_inputs(problem, q, k, v)


_RAMP = Probe(
    name="ramp",
    summary="the logit rises by `rise` log2 units every 16 keys: earlier keys are scaled down",
    fill=_fill_ramp,
    unable=lambda p: (
        logit_out_of_range(p, _FAST * math.log(2.0), _DIGIT) or logit_out_of_range(p, math.log(2.0))
    ),
    allowed=lambda _: {"rise": (_FAST, _SLOW)},
)

_LARGE_LOGIT = 128.0  # |logits| are 128 to 160: exp(−128) is 0 in fp32, and exp(128) is infinite.


def _fill_constant(sign: int, problem: Problem, _: Parameters) -> Inputs:
    q, k = zero_query_and_keys(problem)
    x, y = logit_factors(problem, _LARGE_LOGIT)
    q[..., 0], k[..., 0] = x, sign * y
    fill_orthogonal_columns(q, k, 1)
    return store_inputs(problem, q, k, code_values(problem, key_code(problem)))


_NEGATIVE = Probe(
    name="negative",
    summary="every logit the same, −128 or less, and V a code: the maximum starts at −∞, not 0",
    fill=partial(_fill_constant, -1),
    unable=partial(logit_out_of_range, logit=_LARGE_LOGIT),
)
_POSITIVE = Probe(
    name="positive",
    summary="every logit the same, 128 or more, and V a code: the maximum is subtracted",
    fill=partial(_fill_constant, 1),
    unable=partial(logit_out_of_range, logit=_LARGE_LOGIT),
)

_LEVELS = (8, 14)
"""Distances of the levels in nats, or up to a quarter more. At 8 the lower level weighs 2^-11.5 to
2^-14.4: a normal number in every format of P if P is scaled as it must be, but below e4m3's
smallest number if not. At 14 this holds for e5m2."""


def _fill_two_level(problem: Problem, parameters: Parameters) -> Inputs:
    q, k = zero_query_and_keys(problem)
    x, y = logit_factors(problem, parameters["apart"] / 2)
    low = torch.arange(problem.kv) % 2 == 1
    q[..., 0], k[..., 0] = x, torch.where(low, -y, y).double()
    fill_orthogonal_columns(q, k, 1)
    return store_inputs(problem, q, k, code_values(problem, code_by_parity(problem)))


_TWO_LEVEL = Probe(
    name="two_level",
    summary="odd keys lie `apart` nats or more below even ones, in columns of their own: how much "
    "less they weigh is the temperature",
    fill=_fill_two_level,
    unable=lambda p: logit_out_of_range(p, _LEVELS[0] / 2) or logit_out_of_range(p, _LEVELS[1] / 2),
    allowed=lambda _: {"apart": _LEVELS},
)

# ------------------------------------------------------------------ one key

_ISOLATION = 32.0  # Nats by which the chosen key's logit is above all others, at least.

_LARGEST = 8  # Whole numbers up to it have three significant bits, as e5m2 has.
_KEYS = 6  # Boundary keys that rows choose from, besides the keys at their own edges.


def _own_edges(problem: Problem) -> list[int]:
    """Return keys at the edges of what a row sees, relative to the row: the last, the next."""
    offsets: list[int] = []
    for part in problem.mask.walk():
        if part.name in {"causal", "sliding_window", "prefix_lm"}:
            offsets += [1, 0]
        if part.name == "sliding_window":
            window = cast("int", part.values["window"])
            offsets += [-window, 1 - window]
        if part.name == "causal_bottom_right":
            offsets += [problem.kv - problem.query + 1, problem.kv - problem.query]
        if part.name == "bottom_right":
            lengths = cast("tuple[int, ...]", part.values["lengths"])
            offsets += [n - problem.query + place for n in lengths for place in (1, 0)]
    return list(dict.fromkeys(offsets))


def _chosen_keys(problem: Problem, turn: int) -> torch.Tensor:
    """Return the key that each row singles out on this turn, int64 ``(batch, heads, query)``."""
    shared, row = boundary_keys(problem)[:_KEYS], torch.arange(problem.query)
    own_keys = [row + offset for offset in _own_edges(problem)]
    choices = torch.stack(own_keys + [torch.full_like(row, key) for key in shared])
    spare = torch.tensor(shared)[row % len(shared)]
    choices = torch.where((choices >= 0) & (choices < problem.kv), choices, spare)
    pair = torch.arange(problem.batch)[:, None] + torch.arange(problem.heads)
    which = (pair[..., None] + row + turn) % len(choices)
    return choices[which, row.expand_as(which)]


def _used_bits(problem: Problem) -> int:
    return min(max(1, (problem.kv - 1).bit_length()), problem.head_dim)


def _isolating_factor(problem: Problem) -> float:
    """Return the power of two that puts the chosen key ``_ISOLATION`` or more above any other."""
    differ = problem.head_dim // _used_bits(problem)
    return 2.0 ** math.ceil(math.log2(_ISOLATION / (2 * differ * problem.scale)))


def _unable_to_isolate(problem: Problem) -> str | None:
    fmt, factor = problem.formats.storage, 3 * _isolating_factor(problem)
    if fmt.saturates or 2.0**fmt.min_exponent < factor <= fmt.max:
        return None
    return f"scale={problem.scale:g} asks for q beyond {fmt.name}"


def _signs(numbers: torch.Tensor, bits: int, flips: torch.Tensor) -> torch.Tensor:
    """Return ±1 by the low ``bits`` of each number, repeated along ``flips``'s last axis."""
    column = torch.arange(flips.shape[-1]) % bits
    return 1.0 - 2.0 * ((numbers[..., None] >> column) & 1 ^ flips).double()


def _fill_isolated(problem: Problem, parameters: Parameters) -> Inputs:
    draws, turn, bits = Draws(problem.seed), int(parameters["turn"]), _used_bits(problem)
    heads = (problem.batch, problem.kv_heads)
    flips = torch.from_numpy(draws.integers("isolated signs", (*heads, 1, problem.head_dim), 2))
    k = _signs(torch.arange(problem.kv), bits, flips)
    of_head = flips.repeat_interleave(problem.group, dim=1)
    first, second = (_signs(_chosen_keys(problem, turn + n), bits, of_head) for n in (0, 1))
    q = _isolating_factor(problem) * (2 * first + second)
    shape = (*heads, problem.kv, problem.value_dim)
    v = torch.from_numpy(draws.integers("isolated v", shape, 2 * _LARGEST + 1)).double() - _LARGEST
    v = v[:, :, torch.arange(problem.kv) % 2**bits]  # keys with equal signs have equal values
    return store_inputs(problem, q, k, v * amplitudes(problem)[..., None, None])


_ISOLATED = Probe(
    name="isolated",
    summary="each row singles out a key at a boundary, and a second one should that be hidden: "
    "out is that key's value",
    fill=_fill_isolated,
    unable=_unable_to_isolate,
    allowed=lambda p: {"turn": range(len(_own_edges(p)) + min(_KEYS, p.kv))},
)
"""q = c(2·k₁ + k₂), where keys are distinct rows of signs. With d(x, y) = D − x·y, twice the number
of different signs, k₁ is above any other key x by c(2d(k₁, x) + d(k₂, x) − d(k₁, k₂)) ≥ c·d(k₁, x),
by the triangle inequality. If head_dim is too short for all keys, some share signs and values."""

# ------------------------------------------------------------------ a mean

_OTHERS_BELOW = 40.0  # Nats by which the other keys lie below: they weigh less than 2^-57.

_BITS_FP8, _BITS = 13, 20
"""Most bits of a sum of values: those of the shortest accumulator, for fp8 products on Hopper and
for others. Only fp32 outputs have more."""


def _fill_mean(problem: Problem, _: Parameters) -> Inputs:
    q, k = zero_query_and_keys(problem)
    x, y = logit_factors(problem, _OTHERS_BELOW)
    keys = 1 << (problem.kv.bit_length() - 1)  # the largest power of two up to kv
    q[..., 0] = x
    k[:, :, keys:, 0] = -y
    fill_orthogonal_columns(q, k, 1)
    # Values are 4 … 7 times 2^-s, of three bits; s is limited by the bits of a sum.
    draws, shape = Draws(problem.seed), (*k.shape[:3], problem.value_dim)
    most = max(0, (_BITS_FP8 if problem.formats.scaled else _BITS) - 3 - (keys - 1).bit_length())
    bits, exponent = (
        torch.from_numpy(draws.integers(f"mean {name}", shape, bound)).double()
        for name, bound in (("significand", 4), ("exponent", most + 1))
    )
    v = (4.0 + bits) * torch.pow(2.0, -exponent) * amplitudes(problem)[..., None, None]
    return store_inputs(problem, q, k, v)


_MEAN = Probe(
    name="mean",
    summary="equal weights and V of as many bits as accumulators hold: rows that see 2^n keys give "
    "their mean, rounded once",
    fill=_fill_mean,
    unable=partial(logit_out_of_range, logit=_OTHERS_BELOW),
)

PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (_DECODE, _ONES, _RAMP, _NEGATIVE, _POSITIVE, _TWO_LEVEL, _ISOLATED, _MEAN)
}
"""All probes in the order in which they are run and listed."""

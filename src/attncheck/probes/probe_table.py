"""A probe, and all of them."""

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
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import (
    Allowed,
    Parameters,
    Problem,
    check_parameters,
    fits_all,
    no_parameters,
)
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
from attncheck.probes.tied_keys import Finding, VisibleKeys, check_tied_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Inputs whose right answer is known beforehand, on any Problem of attention.

    All of it is pure: no kernel, no oracle. ``docs/reference/probes.md`` proves what each shows.
    """

    name: str
    summary: str
    # (Problem, parameters) → its Inputs on the CPU; the Problem is ``problem``'s.
    fill: Callable[[Problem, Parameters], Inputs]
    # Why there are no such inputs of a Problem, in one line; None if there are.
    unable: Callable[[Problem], str | None] = fits_all
    # The numbers that each parameter may have, the most telling first.
    allowed: Callable[[Problem], Allowed] = no_parameters

    def problem(self, problem: Problem) -> Problem:
        """Return what replaces ``problem``: without score mod, its distribution not drawn.

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

    def read(
        self,
        inputs: Inputs,
        outputs: Outputs,
        visible: VisibleKeys,
        *,
        errors: WeightErrors = USUAL_WEIGHT_ERRORS,
    ) -> Finding | None:
        """Return what is wrong by the exact rule, or None; see ``check_tied_keys``."""
        return check_tied_keys(inputs, outputs, visible, errors=errors)


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
"""Holds for every right kernel: with all scores 0 every weight is the same power of two, exact in
every format of P, so that sums of 0s and 1s are counts; only the division and out are rounded."""


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
"""Keys of a level: a tile has one level or more, and a step of the recurrence one rise or more."""

_DIGIT = 8  # whole numbers below it have three bits, as e5m2 has
_FAST, _SLOW = 32, 1
"""Rises in log2 units. The levels below the highest vanish; or the maximum rises by so little at a
time that a lazy one lags behind for several tiles."""


def _fill_ramp(problem: Problem, parameters: Parameters) -> Inputs:
    rise, two_digits = int(parameters["rise"]), problem.head_dim > 1
    # An odd number of levels: the next ramp has them on odd places.
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

_FAR = 128.0  # exp(−128) is 0 in fp32 and exp(128) is infinite; the logits are from here to 160


def _fill_constant(sign: int, problem: Problem, _: Parameters) -> Inputs:
    q, k = zero_query_and_keys(problem)
    x, y = logit_factors(problem, _FAR)
    q[..., 0], k[..., 0] = x, sign * y
    fill_orthogonal_columns(q, k, 1)
    return store_inputs(problem, q, k, code_values(problem, key_code(problem)))


_NEGATIVE = Probe(
    name="negative",
    summary="every logit the same, −128 or less, and V a code: the maximum starts at −∞, not 0",
    fill=partial(_fill_constant, -1),
    unable=partial(logit_out_of_range, logit=_FAR),
)
_POSITIVE = Probe(
    name="positive",
    summary="every logit the same, 128 or more, and V a code: the maximum is subtracted",
    fill=partial(_fill_constant, 1),
    unable=partial(logit_out_of_range, logit=_FAR),
)

_LEVELS = (8, 14)
"""Nats, or up to a quarter more. At 8 the lower level weighs 2^-11.5 to 2^-14.4: a normal number of
every format of P that is scaled as it must be, and below e4m3's smallest where it is not. At 14 the
same holds of e5m2."""


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

_APART = 32.0  # nats that the chosen key is above all others, at least

_LARGEST = 8  # whole numbers up to it have three bits, as e5m2 has
_KEYS = 6  # boundary keys that all rows share out among them, beside those at their own edges


def _own_edges(problem: Problem) -> list[int]:
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


def _chosen_keys(problem: Problem, turn: int) -> torch.Tensor:
    """int64 ``(batch, heads, query)``: the key that a row singles out on this turn."""
    shared, row = boundary_keys(problem)[:_KEYS], torch.arange(problem.query)
    own = [row + offset for offset in _own_edges(problem)]
    choices = torch.stack(own + [torch.full_like(row, key) for key in shared])
    spare = torch.tensor(shared)[row % len(shared)]
    choices = torch.where((choices >= 0) & (choices < problem.kv), choices, spare)
    pair = torch.arange(problem.batch)[:, None] + torch.arange(problem.heads)
    which = (pair[..., None] + row + turn) % len(choices)
    return choices[which, row.expand_as(which)]


def _used_bits(problem: Problem) -> int:
    return min(max(1, (problem.kv - 1).bit_length()), problem.head_dim)


def _isolating_factor(problem: Problem) -> float:
    """The power of two that makes two keys, of which one is singled out, lie ``_APART``."""
    differ = problem.head_dim // _used_bits(problem)
    return 2.0 ** math.ceil(math.log2(_APART / (2 * differ * problem.scale)))


def _unable_to_isolate(problem: Problem) -> str | None:
    fmt, factor = problem.formats.storage, 3 * _isolating_factor(problem)
    if fmt.saturates or 2.0**fmt.min_exponent < factor <= fmt.max:
        return None
    return f"scale={problem.scale:g} asks for q beyond {fmt.name}"


def _signs(numbers: torch.Tensor, bits: int, flips: torch.Tensor) -> torch.Tensor:
    """±1 by the low ``bits`` of each number, over and over along a last axis like ``flips``'s."""
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
    v = v[:, :, torch.arange(problem.kv) % 2**bits]  # keys of the same signs have the same values
    return store_inputs(problem, q, k, v * amplitudes(problem)[..., None, None])


_ISOLATED = Probe(
    name="isolated",
    summary="each row singles out a key at a boundary, and a second one should that be hidden: "
    "out is that key's value",
    fill=_fill_isolated,
    unable=_unable_to_isolate,
    allowed=lambda p: {"turn": range(len(_own_edges(p)) + min(_KEYS, p.kv))},
)
"""q = c(2·k₁ + k₂) with k distinct rows of signs. With d(x, y) = D − x·y, twice the signs that
differ, k₁ is above any other key x by c(2d(k₁, x) + d(k₂, x) − d(k₁, k₂)) ≥ c·d(k₁, x): the
triangle inequality. Where head_dim is too short for that many keys, keys share signs and values."""

# ------------------------------------------------------------------ a mean

_BELOW = 40.0  # nats that the other keys lie below: they weigh less than 2^-57

_BITS_FP8, _BITS = 13, 20
"""Of a sum of values at most: what the shortest accumulator holds, of fp8 products on Hopper and of
others; more than any output has but fp32."""


def _fill_mean(problem: Problem, _: Parameters) -> Inputs:
    q, k = zero_query_and_keys(problem)
    x, y = logit_factors(problem, _BELOW)
    keys = 1 << (problem.kv.bit_length() - 1)  # the largest power of two that there is
    q[..., 0] = x
    k[:, :, keys:, 0] = -y
    fill_orthogonal_columns(q, k, 1)
    # 4 … 7 times 2^-s, of three bits each; s as large as the sum's bits allow.
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
    unable=partial(logit_out_of_range, logit=_BELOW),
)

ALL_PROBES = (_DECODE, _ONES, _RAMP, _NEGATIVE, _POSITIVE, _TWO_LEVEL, _ISOLATED, _MEAN)
"""In the order in which they are run and listed."""

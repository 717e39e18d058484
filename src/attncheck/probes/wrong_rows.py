"""Descriptions of a wrong row: keys missing or too many, a factor, a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.probes.margins import HALF, QUARTER
from attncheck.probes.probe_inputs import amplitudes

if TYPE_CHECKING:
    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs

__all__ = ["describe_wrong_row", "explain_row"]


_NAMED = 3  # keys, or runs of them, of a longer list
_RUN = 3  # keys in a row that are told as one
_FEW = 4  # keys that the column with the fewest may hold, where it tells how many there are
_GUESSES = (
    9  # numbers of keys that are tried where LSE does not tell: four too few to four too many
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _WrongRow:
    """A row whose count is wrong, float64.

    Attributes:
        out: What the kernel gave, ``(value_dim,)``, in units of V.
        values: V of its key head in the same units, whole numbers, ``(kv, value_dim)``.
        score: scale · q·k of every key, seen or not, ``(kv,)``.
        tied: bool ``(kv,)``: the keys that should share its weight.
        used: How many keys share it by the kernel's LSE; 0 where it exposes none.
    """

    out: torch.Tensor
    values: torch.Tensor
    score: torch.Tensor
    tied: torch.Tensor
    used: float

    @property
    def keys(self) -> int:
        """How many keys should share its weight."""
        return int(self.tied.sum())


def describe_wrong_row(
    inputs: Inputs, place: tuple[int, int, int], out: torch.Tensor, used: float, tied: torch.Tensor
) -> tuple[int, str]:
    """The first wrong key and what is wrong, in words; −1 where no key is told.

    Args:
        inputs: Of a probe.
        place: (batch, head, row).
        out: What the kernel gave, float64 ``(value_dim,)``.
        used: How many keys share its weight by the kernel's LSE; 0 where it exposes none.
        tied: bool ``(kv,)``: the keys that should share it.

    Hypotheses in this order: another key head's or batch's values; keys missing or too many, by the
    code of their values; another key alone; a factor.
    """
    q, k, v = inputs.promoted()
    own = (place[0], place[1] // inputs.problem.group)
    units = amplitudes(inputs.problem).to(out.device)
    row = _WrongRow(
        out=out / units[own],
        values=v[own] / units[own],
        score=k[own] @ q[place] * inputs.problem.scale,
        tied=tied,
        used=used,
    )
    if not bool(out.any()):
        key = int(tied.nonzero()) if row.keys == 1 else -1
        return key, f"key {key} is missing: out is 0" if row.keys == 1 else "out is 0"
    return (
        _another_head(row, v / units[..., None, None], own, units)
        or _by_code(row)
        or _another_key(v / units[..., None, None], own, out / units[..., None], tied)
        or (-1, _factor_or_number(row))
    )


def _another_head(
    row: _WrongRow, values: torch.Tensor, own: tuple[int, int], units: torch.Tensor
) -> tuple[int, str] | None:
    """A batch and key head of whose values, at the right keys, out is the mean."""
    counts = row.out * row.keys * (units[own] / units)[..., None]
    sums = row.tied.double() @ values
    fits = ((counts - sums).abs() < HALF).all(-1) & sums.any(-1)
    others = [place for place in fits.nonzero().tolist() if tuple(place) != own]
    if bool(fits[own]) or not others:
        return None
    batch, head = others[0]
    said = f"key head {head} of batch {batch}, not {own[1]} of {own[0]}"
    return -1, f"its values are those of {said}"


def _by_code(row: _WrongRow) -> tuple[int, str] | None:
    """The keys that it used, where whole counts and their number agree."""
    if bool((row.values < 0).any()) or not torch.equal(row.values, row.values.round()):
        return None
    for number in _numbers(row):
        counts = row.out * number
        if not bool(((counts - counts.round()).abs() < QUARTER).all()):
            continue
        left = counts.round() - row.tied.double() @ row.values
        if not bool(left.any()):
            named = _by_number(row, number)
        elif abs(row.used - number) < HALF or not row.used:
            named = _alike(row, left, number) or _larger(row, left, number)
        else:  # LSE says that they are others
            named = _larger(row, left, number) or _alike(row, left, number)
        if named is not None:
            return named
    return None


def _by_number(row: _WrongRow, number: int) -> tuple[int, str] | None:
    """What is wrong where the values are right."""
    if number < row.keys:
        return None
    divided = f"it shares its weight among {number} keys, some without values,"
    told = f"exp(LSE) counts {row.used:.6g} keys"
    return -1, f"{told if number == row.keys else divided} where it should have {row.keys}"


def _numbers(row: _WrongRow) -> list[int]:
    """How many keys the row may have used, the likeliest first."""
    most = 2 * len(row.tied)
    told = [round(row.used)] if HALF <= row.used <= most else []
    near = sorted(range(1, most + 1), key=lambda n: abs(n - row.keys))[:_GUESSES]
    far = [] if told else _numbers_by_column(row, most)
    return list(dict.fromkeys([row.keys, *told, *near, *far]))


def _numbers_by_column(row: _WrongRow, most: int) -> list[int]:
    """How many keys there are if the smallest column holds 1, 2, …; first what leaves least."""
    smallest = float(row.out.masked_fill(row.out <= 0, torch.inf).amin())
    if not smallest * most >= HALF:  # less than one key of them all, or NaN
        return []
    tried = (round(few / smallest) + off for few in range(1, _FEW + 1) for off in (0, -1, 1))
    near = [number for number in tried if 1 <= number <= most]

    def left(number: int) -> float:
        counts = row.out * number
        return float((counts - counts.round()).abs().amax()) / number

    return sorted(near, key=left)


def _alike(row: _WrongRow, left: torch.Tensor, number: int) -> tuple[int, str] | None:
    """Keys whose values make what is ``left``, and whose number makes ``number``.

    Keys too many have the score of the others, or a larger one: then those have no weight.
    """
    whole = bool(row.values.any(-1).all())
    alike = row.score == row.score[row.tied][0]
    found = []
    for order in (_from_last, _from_first, _from_edges):
        rest = left.clone()
        missing = _taken(row.values, rest, order(row.tied), -1)
        extra = _taken(row.values, rest, order(alike & ~row.tied), 1)
        twice = _taken(row.values, rest, order(row.tied), 1)
        used = row.keys - len(missing) + len(extra) + len(twice)
        if not bool(rest.any()) and (used == number or not whole):
            found.append((_runs(row.tied, missing, extra), missing, extra, twice))
    if not found:
        return None
    _, missing, extra, twice = min(found, key=lambda one: one[0])
    said = [f"{_listed(missing)} missing"] if missing else []
    said += [f"{_listed(extra)} too many"] if extra else []
    said += [f"{_listed(twice)} there twice"] if twice else []
    return min(missing or extra or twice), " and ".join(said)


def _runs(tied: torch.Tensor, missing: list[int], extra: list[int]) -> int:
    """How many runs of keys a row then saw: of several readings the simplest is taken."""
    saw = tied.cpu().clone()
    saw[missing] = False
    saw[extra] = True
    return int(saw[:1].sum() + (saw[1:] & ~saw[:-1]).sum())


def _larger(row: _WrongRow, left: torch.Tensor, number: int) -> tuple[int, str] | None:
    larger = row.score[row.score > row.score[row.tied][0]]
    for score in sorted(set(larger.tolist()), reverse=True):
        rest = left + row.tied.double() @ row.values
        taken = _taken(row.values, rest, _from_first(row.score == score), 1)
        if taken and len(taken) == number and not bool(rest.any()):
            listed = _listed(taken).rpartition(" ")[0]
            return taken[0], f"its weight is on {listed}, which it must not see"
    return None


def _taken(values: torch.Tensor, left: torch.Tensor, order: list[int], sign: int) -> list[int]:
    """Keys that explain what is ``left`` of one sign, which is lessened by their values."""
    able = (((left * sign >= values) | (values == 0)).all(-1) & values.any(-1)).tolist()
    taken = []
    for key in (key for key in order if able[key]):
        value = values[key]
        if bool(((left * sign >= value) | (value == 0)).all()):
            left -= value * sign
            taken.append(key)
    return sorted(taken)


def _from_edges(among: torch.Tensor) -> list[int]:
    """Keys, those nearest to an edge of their run of ``among`` first."""
    among = among.cpu()
    end = torch.ones(1, dtype=torch.bool)
    edge = torch.cat([end, among[1:] != among[:-1], end]).nonzero().flatten()
    key = torch.arange(len(among))
    after = torch.searchsorted(edge, key, right=True)
    distance = torch.minimum(key - edge[after - 1], edge[after] - 1 - key).tolist()
    return sorted(key[among].tolist(), key=lambda j: (distance[j], j))


def _from_last(among: torch.Tensor) -> list[int]:
    return _from_first(among)[::-1]


def _from_first(among: torch.Tensor) -> list[int]:
    keys: list[int] = among.nonzero().flatten().tolist()
    return keys


def _listed(keys: list[int]) -> str:
    if len(keys) == 1:
        return f"key {keys[0]} is"
    parts = _parts(keys)
    shown = ", ".join(map(_part, parts[:_NAMED]))
    left = sum(map(len, parts[_NAMED:]))
    more = f" and {left} more" if left else ""
    return f"keys {shown}{more} are"


def _parts(keys: list[int]) -> list[range]:
    """Ascending ``keys`` as ranges; runs shorter than ``_RUN`` key by key."""
    runs: list[range] = []
    for key in keys:
        if runs and runs[-1].stop == key:
            runs[-1] = range(runs[-1].start, key + 1)
        else:
            runs.append(range(key, key + 1))
    return [
        part
        for run in runs
        for part in ([run] if len(run) >= _RUN else [range(key, key + 1) for key in run])
    ]


def _part(part: range) -> str:
    return str(part.start) if len(part) == 1 else f"{part.start}–{part.stop - 1}"


def _another_key(
    values: torch.Tensor, own: tuple[int, int], out: torch.Tensor, tied: torch.Tensor
) -> tuple[int, str] | None:
    """A key, of any head, whose value out is; ``out`` in units of each head."""
    same = ((values - out[:, :, None]).abs() < HALF).all(-1) & values.any(-1)
    if not bool(same.any()) or bool((same[own] & tied).any()):
        return None
    first = int(tied.nonzero()[0])
    if bool(same[own].any()):
        key = int(same[own].nonzero()[0])
        return key, f"its weight is on key {key}, and should be on key {first}"
    batch, head, key = same.nonzero()[0].tolist()
    said = f"out is the value of key {key} of key head {head} of batch {batch}"
    return key, f"{said}, and should be that of key {first} of {own[1]} of {own[0]}"


def _factor_or_number(row: _WrongRow) -> str:
    exact = row.tied.double() @ row.values / row.keys
    if bool(exact.any()):
        factor = float((row.out * exact).sum() / exact.square().sum())
        off = (row.out - factor * exact).abs() * row.keys
        # A small factor makes everything small: what is left must be no key of the row as it is.
        if bool((off < HALF * min(1.0, abs(factor))).all()) and abs(factor - 1) * row.keys >= HALF:
            return f"out is {factor:.4g} times what it should be"
    return f"it is not the mean of the values of its {row.keys} key{'s' * (row.keys > 1)}"


_STEPS = 12  # each moves the scale by a factor of e at most


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _ExplainedRow:
    """One row, exactly: float64. ``value_dim + 1`` is out's columns and LSE.

    Attributes:
        score: scale · q·k of every key, seen or not, ``(kv,)``.
        seen: bool ``(kv,)``: what the row sees.
        v: Values of its key head, ``(kv, value_dim)``.
        out, lse: The exact result.
        error: What the kernel gave less that, in units of what rounding allows,
            ``(value_dim + 1,)``; 0 for an LSE that is not exposed.
        unit: 1 / what rounding allows, as long.
    """

    score: torch.Tensor
    seen: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    error: torch.Tensor
    unit: torch.Tensor

    @property
    def odds(self) -> torch.Tensor:
        """Natural logarithm of the weights, ``(kv,)``."""
        return self.score - self.lse

    def left(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """How much of the error is left after these changes of out and LSE.

        Of out, in parts of its size and no less than rounding leaves; or of LSE, if that is more.
        """
        moved = torch.cat([out, lse[..., None]], dim=-1) * self.unit
        rest = self.error - moved
        sizes = (self.error[:-1].norm(), self.error[-1].abs())
        least = (math.sqrt(len(self.error)), 1.0)
        parts = (rest[..., :-1].norm(dim=-1), rest[..., -1].abs())
        of_out, of_lse = (
            part / size.clamp(min=low) for part, size, low in zip(parts, sizes, least, strict=True)
        )
        return torch.maximum(of_out, of_lse)

    def fitted(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[float, float]:
        """The multiple of these changes that leaves least, and how much that is."""
        moved = torch.cat([out, lse[..., None]], dim=-1) * self.unit
        square = float(moved.square().sum())
        times = float((self.error * moved).sum()) / square if square else 0.0
        return times, float(self.left(times * out, times * lse))


def explain_row(
    inputs: Inputs,
    given: Outputs,
    truth: Outputs,
    allowed: Outputs,
    seen: torch.Tensor,
    place: tuple[int, int, int],
) -> tuple[int, str]:
    """A key and what happened to it, in words; −1 and other words where no single key explains it.

    Args:
        inputs: Of a probe.
        given: What the kernel gave.
        truth: What it must be, float64.
        allowed: What rounding allows, float64.
        seen: bool ``(kv,)``: what the row sees.
        place: (batch, head, row).

    Each hypothesis moves the row's exact out and LSE in a way of its own. That after which least of
    the error is left, in units of what rounding allows, explains it if less than half is left.
    """
    row = _row(inputs, given, truth, allowed, seen, place)
    if not bool(row.error.isfinite().all()):
        return -1, "explained by nothing that is finite"
    # What says all of LSE must say it better than what merely has the right size.
    groups = (((_base,), QUARTER * QUARTER), ((_one_key,), HALF), ((_factor, _scale), QUARTER))
    for tried, most in groups:
        left, key, said = min((one(row) for one in tried), key=lambda one: one[0])
        if left < most:
            return key, f"explained best by {said}"
    if bool((row.error[:-1].abs() <= 1.0).all()):
        off = float(row.error[-1] / row.unit[-1])
        return -1, f"right in out, and its LSE is {off:+.5g} off"
    return -1, "explained by no single key, factor or scale"


def _row(
    inputs: Inputs,
    given: Outputs,
    truth: Outputs,
    allowed: Outputs,
    seen: torch.Tensor,
    place: tuple[int, int, int],
) -> _ExplainedRow:
    b, h, _ = place
    q, k, v = inputs.promoted()
    own = (b, h // inputs.problem.group)
    assert truth.lse is not None, "the oracle always gives LSE"
    assert allowed.lse is not None, "and so do the bounds"
    lse = truth.lse[place]
    given_lse = lse if given.lse is None else given.lse[place].double()
    error = torch.cat([given.out[place].double() - truth.out[place], (given_lse - lse)[None]])
    size = torch.cat([allowed.out[place], allowed.lse[place][None]])
    # Where nothing at all is allowed, as little as anywhere in the row.
    least = size[size > 0].amin() if bool((size > 0).any()) else torch.ones_like(lse)
    unit = 1.0 / size.clamp(min=float(least))
    return _ExplainedRow(
        score=k[own] @ q[place] * inputs.problem.scale,
        seen=seen,
        v=v[own],
        out=truth.out[place],
        lse=lse,
        error=error * unit,
        unit=unit,
    )


def _one_key(row: _ExplainedRow) -> tuple[float, int, str]:
    """Leaving out key j moves out by w(out − v)/(1 − w) and LSE by ln(1 − w).

    One more moves them by w(v − out)/(1 + w) and ln(1 + w).
    """
    weight = row.odds.exp()
    alone = row.seen & (weight >= 1.0)
    kept = torch.where(row.seen & ~alone, weight, 0.0)
    factor = torch.where(row.seen, -kept / (1 - kept), torch.sigmoid(row.odds))
    lse = torch.where(row.seen, torch.log1p(-kept), torch.nn.functional.softplus(row.odds))
    left = row.left(factor[:, None] * (row.v - row.out), lse).masked_fill(alone, math.inf)
    key = int(left.argmin())
    seen = bool(row.seen[key])
    said = f"key {key} left out" if seen else f"key {key}, which the row must not see"
    return float(left[key]), key, said


def _factor(row: _ExplainedRow) -> tuple[float, int, str]:
    times, left = row.fitted(row.out, torch.zeros_like(row.lse))
    return left, -1, f"a factor of {1 + times:.6g} on out"


def _scale(row: _ExplainedRow) -> tuple[float, int, str]:
    """Gauss and Newton's steps to the scale that leaves least, then what that truly leaves.

    The derivatives by its logarithm: Σ w·score·(v − out), and Σ w·score of LSE.
    """
    factor, left = 1.0, math.inf
    for _ in range(_STEPS):
        score = (row.score * factor).masked_fill(~row.seen, -math.inf)
        weight, lse = torch.softmax(score, -1), torch.logsumexp(score, -1)
        out = weight @ row.v
        moved = torch.cat([out - row.out, (lse - row.lse)[None]])
        left = float(row.left(moved[:-1], moved[-1]))
        pull = weight * torch.where(row.seen, score, 0.0)
        slope = torch.cat([pull @ (row.v - out), pull.sum()[None]]) * row.unit
        square = float(slope.square().sum())
        if left == 0.0 or not 0.0 < square < math.inf:
            break
        step = float(((row.error - moved * row.unit) * slope).sum()) / square
        factor *= math.exp(min(max(step, -1.0), 1.0))
    return left, -1, f"scores about {factor:.4g} times as large"


def _base(row: _ExplainedRow) -> tuple[float, int, str]:
    lse = row.lse * (math.log2(math.e) - 1.0)
    return float(row.left(torch.zeros_like(row.out), lse)), -1, "an LSE to base 2"

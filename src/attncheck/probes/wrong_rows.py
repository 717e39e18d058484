"""Descriptions of a wrong row: keys missing or too many, a factor, a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.probes.margins import HALF, QUARTER
from attncheck.probes.probe_inputs import amplitudes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.inputs.input_tensors import Inputs

    KeyAndWords = tuple[int, str]  # key −1 if no key is identified

_NAMED = 3  # Most keys, or runs of keys, that a list names.
_RANGE = 3  # Fewest consecutive keys that are listed as a range.
_SMALLEST = 4  # Most keys assumed in the smallest column, to derive the total number of keys.
_GUESSES = 9  # Numbers of keys to try without LSE: from four too few to four too many.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _WrongRow:
    """A row whose count is wrong, float64."""

    out: torch.Tensor  # the kernel's out, ``(value_dim,)``, in units of V
    values: torch.Tensor  # V of its key head in the same units, whole numbers, ``(kv, value_dim)``
    score: torch.Tensor  # scale · q·k of every key, seen or not, ``(kv,)``
    tied: torch.Tensor  # bool ``(kv,)``: the keys that should share the row's weight
    keys: int  # number of tied keys
    used: float  # number of keys by the kernel's LSE; 0 if it exposes no LSE


def describe_wrong_row(
    inputs: Inputs, place: tuple[int, int, int], out: torch.Tensor, used: float, tied: torch.Tensor
) -> KeyAndWords:
    """Return the first wrong key, −1 if none is identified, and what is wrong, in words.

    Hypotheses are tried in this order: values of another key head or batch; keys missing or too
    many, by the code of their values; a single other key; a factor.

    Args:
        place: (batch, head, row).
        out: The kernel's out, float64 ``(value_dim,)``.
        used: Number of keys that share the row's weight by the kernel's LSE; 0 without LSE.
        tied: bool ``(kv,)``: the keys that should share the weight.
    """
    q, k, v = inputs.promoted()
    own = (place[0], place[1] // inputs.problem.group)
    units = amplitudes(inputs.problem).to(out.device)
    keys = int(tied.sum())
    if not bool(out.any()):
        key = int(tied.nonzero()) if keys == 1 else -1
        return key, f"key {key} is missing: out is 0" if keys == 1 else "out is 0"
    values = v / units[..., None, None]
    row = _WrongRow(
        out=out / units[own],
        values=values[own],
        score=k[own] @ q[place] * inputs.problem.scale,
        tied=tied,
        keys=keys,
        used=used,
    )
    return (
        _another_head(row, values, own, units)
        or _by_code(row)
        or _another_key(values, own, out / units[..., None], tied)
        or (-1, _factor_or_number(row))
    )


def _another_head(
    row: _WrongRow, values: torch.Tensor, own: tuple[int, int], units: torch.Tensor
) -> KeyAndWords | None:
    """Describe another batch or key head if out is the mean of its values at the tied keys."""
    counts = row.out * row.keys * (units[own] / units)[..., None]
    sums = row.tied.double() @ values
    fits = ((counts - sums).abs() < HALF).all(-1) & sums.any(-1)
    others = [place for place in fits.nonzero().tolist() if tuple(place) != own]
    if bool(fits[own]) or not others:
        return None
    batch, head = others[0]
    return -1, (
        f"its values are those of key head {head} of batch {batch}, not {own[1]} of {own[0]}"
    )


def _another_key(
    values: torch.Tensor, own: tuple[int, int], out: torch.Tensor, tied: torch.Tensor
) -> KeyAndWords | None:
    """Describe another key, of any head, if out is its value; ``out`` is in units of each head."""
    same = ((values - out[:, :, None]).abs() < HALF).all(-1) & values.any(-1)
    if not bool(same.any()) or bool((same[own] & tied).any()):
        return None
    first = int(tied.nonzero()[0])
    if bool(same[own].any()):
        key = int(same[own].nonzero()[0])
        return key, f"its weight is on key {key}, and should be on key {first}"
    batch, head, key = same.nonzero()[0].tolist()
    other = f"out is the value of key {key} of key head {head} of batch {batch}"
    return key, f"{other}, and should be that of key {first} of {own[1]} of {own[0]}"


def _factor_or_number(row: _WrongRow) -> str:
    exact = row.tied.double() @ row.values / row.keys
    if bool(exact.any()):
        factor = float((row.out * exact).sum() / exact.square().sum())
        off = (row.out - factor * exact).abs() * row.keys
        # With a small factor the limit is smaller: the rest must hold no key times the factor.
        if bool((off < HALF * min(1.0, abs(factor))).all()) and abs(factor - 1) * row.keys >= HALF:
            return f"out is {factor:.4g} times what it should be"
    return f"it is not the mean of the values of its {row.keys} key{'s' * (row.keys > 1)}"


def _by_code(row: _WrongRow) -> KeyAndWords | None:
    """Describe the keys that the row used, if V is a code and the counts are whole numbers."""
    if bool((row.values < 0).any()) or not torch.equal(row.values, row.values.round()):
        return None
    for number in _key_numbers(row):
        counts = row.out * number
        if not bool(((counts - counts.round()).abs() < QUARTER).all()):
            continue
        excess = counts.round() - row.tied.double() @ row.values
        by_lse = abs(row.used - number) < HALF or not row.used
        if not bool(excess.any()):  # the values are right
            result = _wrong_number(row, number)
        elif by_lse:
            result = _equal_keys(row, excess, number) or _larger_keys(row, excess, number)
        else:  # by LSE the keys may have another score
            result = _larger_keys(row, excess, number) or _equal_keys(row, excess, number)
        if result is not None:
            return result
    return None


def _wrong_number(row: _WrongRow, number: int) -> KeyAndWords | None:
    if number < row.keys:
        return None
    if number == row.keys:
        return -1, f"exp(LSE) counts {row.used:.6g} keys where it should have {row.keys}"
    shared = f"it shares its weight among {number} keys, some without values,"
    return -1, f"{shared} where it should have {row.keys}"


def _key_numbers(row: _WrongRow) -> list[int]:
    """Return numbers of keys that the row may have used, the likeliest first."""
    most = 2 * len(row.tied)
    by_lse = [round(row.used)] if HALF <= row.used <= most else []
    near = sorted(range(1, most + 1), key=lambda n: abs(n - row.keys))[:_GUESSES]
    by_column = [] if by_lse else _numbers_by_column(row, most)
    return list(dict.fromkeys([row.keys, *by_lse, *near, *by_column]))


def _numbers_by_column(row: _WrongRow, most: int) -> list[int]:
    """Return numbers of keys if the smallest column holds 1, 2, … keys; the likeliest first."""
    smallest = float(row.out.masked_fill(row.out <= 0, torch.inf).amin())
    if not smallest * most >= HALF:  # less than one key of ``most``, or NaN
        return []
    guesses = (round(few / smallest) + off for few in range(1, _SMALLEST + 1) for off in (0, -1, 1))

    def remainder(number: int) -> float:
        counts = row.out * number
        return float((counts - counts.round()).abs().amax()) / number

    return sorted((number for number in guesses if 1 <= number <= most), key=remainder)


def _equal_keys(row: _WrongRow, excess: torch.Tensor, number: int) -> KeyAndWords | None:
    """Describe missing, extra and doubled keys that explain the counts ``excess`` and ``number``.

    Extra keys are assumed to have the score of the tied ones; see ``_larger_keys`` for others.
    """
    whole = bool(row.values.any(-1).all())
    same_score = row.score == row.score[row.tied][0]
    readings = []
    for order in (_from_last, _from_first, _from_edges):
        rest = excess.clone()
        missing = _take(row.values, rest, order(row.tied), -1)
        extra = _take(row.values, rest, order(same_score & ~row.tied), 1)
        twice = _take(row.values, rest, order(row.tied), 1)
        used = row.keys - len(missing) + len(extra) + len(twice)
        if not bool(rest.any()) and (used == number or not whole):
            readings.append((_count_runs(row.tied, missing, extra), missing, extra, twice))
    if not readings:
        return None
    _, missing, extra, twice = min(readings, key=lambda one: one[0])
    kinds = ((missing, "missing"), (extra, "too many"), (twice, "there twice"))
    words = " and ".join(f"{_list_keys(keys)} {fate}" for keys, fate in kinds if keys)
    return min(missing or extra or twice), words


def _count_runs(tied: torch.Tensor, missing: list[int], extra: list[int]) -> int:
    """Return how many runs of keys a row then saw; the reading with the fewest is reported."""
    seen = tied.cpu().clone()
    seen[missing] = False
    seen[extra] = True
    return int(seen[:1].sum() + (seen[1:] & ~seen[:-1]).sum())


def _larger_keys(row: _WrongRow, excess: torch.Tensor, number: int) -> KeyAndWords | None:
    """Describe keys of a larger score that have all the weight, if they explain the counts."""
    larger = row.score[row.score > row.score[row.tied][0]]
    for score in sorted(set(larger.tolist()), reverse=True):
        rest = excess + row.tied.double() @ row.values
        keys = _take(row.values, rest, _from_first(row.score == score), 1)
        if keys and len(keys) == number and not bool(rest.any()):
            listed = _list_keys(keys).rpartition(" ")[0]
            return keys[0], f"its weight is on {listed}, which it must not see"
    return None


def _take(values: torch.Tensor, excess: torch.Tensor, order: list[int], sign: int) -> list[int]:
    """Return keys that explain the counts ``excess`` of one sign, and subtract their values."""
    candidates = (((excess * sign >= values) | (values == 0)).all(-1) & values.any(-1)).tolist()
    keys = []
    for key in (key for key in order if candidates[key]):
        value = values[key]
        if bool(((excess * sign >= value) | (value == 0)).all()):
            excess -= value * sign
            keys.append(key)
    return sorted(keys)


def _from_first(among: torch.Tensor) -> list[int]:
    keys: list[int] = among.nonzero().flatten().tolist()
    return keys


def _from_last(among: torch.Tensor) -> list[int]:
    return _from_first(among)[::-1]


def _from_edges(among: torch.Tensor) -> list[int]:
    """Return the keys of ``among``, those nearest to an edge of their run first."""
    among = among.cpu()
    end = torch.ones(1, dtype=torch.bool)
    edge = torch.cat([end, among[1:] != among[:-1], end]).nonzero().flatten()
    key = torch.arange(len(among))
    after = torch.searchsorted(edge, key, right=True)
    distance = torch.minimum(key - edge[after - 1], edge[after] - 1 - key).tolist()
    return sorted(key[among].tolist(), key=lambda j: (distance[j], j))


def _list_keys(keys: list[int]) -> str:
    """Return ascending ``keys`` in words; runs of ``_RANGE`` or more as ranges."""
    if len(keys) == 1:
        return f"key {keys[0]} is"
    parts = list(_ranges(keys))
    listed = ", ".join(
        str(part.start) if len(part) == 1 else f"{part.start}–{part.stop - 1}"
        for part in parts[:_NAMED]
    )
    left = sum(map(len, parts[_NAMED:]))
    more = f" and {left} more" if left else ""
    return f"keys {listed}{more} are"


def _ranges(keys: list[int]) -> Iterator[range]:
    runs: list[range] = []
    for key in keys:
        if runs and runs[-1].stop == key:
            runs[-1] = range(runs[-1].start, key + 1)
        else:
            runs.append(range(key, key + 1))
    for run in runs:
        yield from [run] if len(run) >= _RANGE else [range(key, key + 1) for key in run]

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

    KeyAndWords = tuple[int, str]  # −1 where no key is told

_NAMED = 3  # keys, or runs of them, of a longer list
_RUN = 3  # keys in a row that are told as one
_FEW = 4  # keys that the column with the fewest may hold, where it tells how many there are
_GUESSES = 9  # numbers of keys to try where LSE does not tell: four too few to four too many


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _WrongRow:
    """A row whose count is wrong, float64."""

    out: torch.Tensor  # what the kernel gave, ``(value_dim,)``, in units of V
    values: torch.Tensor  # V of its key head in the same units, whole numbers, ``(kv, value_dim)``
    score: torch.Tensor  # scale · q·k of every key, seen or not, ``(kv,)``
    tied: torch.Tensor  # bool ``(kv,)``: the keys that should share its weight
    keys: int  # how many they are
    used: float  # how many keys share it by the kernel's LSE; 0 where it exposes none


def describe_wrong_row(
    inputs: Inputs, place: tuple[int, int, int], out: torch.Tensor, used: float, tied: torch.Tensor
) -> KeyAndWords:
    """Return the first wrong key and what is wrong, in words; −1 where no key is told.

    Hypotheses in this order: another key head's or batch's values; keys missing or too many, by the
    code of their values; another key alone; a factor.

    Args:
        place: (batch, head, row).
        out: What the kernel gave, float64 ``(value_dim,)``.
        used: How many keys share its weight by the kernel's LSE; 0 where it exposes none.
        tied: bool ``(kv,)``: the keys that should share it.
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
    """A batch and key head of whose values, at the right keys, out is the mean."""
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
    """A key, of any head, whose value out is; ``out`` in units of each head."""
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
        # A small factor makes everything small: what is left must be no key of the row as it is.
        if bool((off < HALF * min(1.0, abs(factor))).all()) and abs(factor - 1) * row.keys >= HALF:
            return f"out is {factor:.4g} times what it should be"
    return f"it is not the mean of the values of its {row.keys} key{'s' * (row.keys > 1)}"


def _by_code(row: _WrongRow) -> KeyAndWords | None:
    """The keys that it used, where whole counts and their number agree."""
    if bool((row.values < 0).any()) or not torch.equal(row.values, row.values.round()):
        return None
    for number in _key_numbers(row):
        counts = row.out * number
        if not bool(((counts - counts.round()).abs() < QUARTER).all()):
            continue
        left = counts.round() - row.tied.double() @ row.values
        by_lse = abs(row.used - number) < HALF or not row.used
        if not bool(left.any()):  # the values are right
            result = _wrong_number(row, number)
        elif by_lse:
            result = _equal_keys(row, left, number) or _larger_keys(row, left, number)
        else:  # LSE says that they are others
            result = _larger_keys(row, left, number) or _equal_keys(row, left, number)
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
    """Return how many keys the row may have used, the likeliest first."""
    most = 2 * len(row.tied)
    by_lse = [round(row.used)] if HALF <= row.used <= most else []
    near = sorted(range(1, most + 1), key=lambda n: abs(n - row.keys))[:_GUESSES]
    far = [] if by_lse else _numbers_by_column(row, most)
    return list(dict.fromkeys([row.keys, *by_lse, *near, *far]))


def _numbers_by_column(row: _WrongRow, most: int) -> list[int]:
    """Return how many keys there are if the smallest column holds 1, 2, …; the likeliest first."""
    smallest = float(row.out.masked_fill(row.out <= 0, torch.inf).amin())
    if not smallest * most >= HALF:  # less than one key of them all, or NaN
        return []
    guesses = (round(few / smallest) + off for few in range(1, _FEW + 1) for off in (0, -1, 1))

    def left(number: int) -> float:
        counts = row.out * number
        return float((counts - counts.round()).abs().amax()) / number

    return sorted((number for number in guesses if 1 <= number <= most), key=left)


def _equal_keys(row: _WrongRow, left: torch.Tensor, number: int) -> KeyAndWords | None:
    """Keys whose values make what is ``left``, and whose number makes ``number``.

    Keys too many have the score of the others, or a larger one: then those have no weight.
    """
    whole = bool(row.values.any(-1).all())
    alike = row.score == row.score[row.tied][0]
    readings = []
    for order in (_from_last, _from_first, _from_edges):
        rest = left.clone()
        missing = _take(row.values, rest, order(row.tied), -1)
        extra = _take(row.values, rest, order(alike & ~row.tied), 1)
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
    """Return how many runs of keys a row then saw: of several readings the simplest is taken."""
    saw = tied.cpu().clone()
    saw[missing] = False
    saw[extra] = True
    return int(saw[:1].sum() + (saw[1:] & ~saw[:-1]).sum())


def _larger_keys(row: _WrongRow, left: torch.Tensor, number: int) -> KeyAndWords | None:
    larger = row.score[row.score > row.score[row.tied][0]]
    for score in sorted(set(larger.tolist()), reverse=True):
        rest = left + row.tied.double() @ row.values
        keys = _take(row.values, rest, _from_first(row.score == score), 1)
        if keys and len(keys) == number and not bool(rest.any()):
            listed = _list_keys(keys).rpartition(" ")[0]
            return keys[0], f"its weight is on {listed}, which it must not see"
    return None


def _take(values: torch.Tensor, left: torch.Tensor, order: list[int], sign: int) -> list[int]:
    """Keys that explain what is ``left`` of one sign, which is lessened by their values."""
    able = (((left * sign >= values) | (values == 0)).all(-1) & values.any(-1)).tolist()
    keys = []
    for key in (key for key in order if able[key]):
        value = values[key]
        if bool(((left * sign >= value) | (value == 0)).all()):
            left -= value * sign
            keys.append(key)
    return sorted(keys)


def _from_first(among: torch.Tensor) -> list[int]:
    keys: list[int] = among.nonzero().flatten().tolist()
    return keys


def _from_last(among: torch.Tensor) -> list[int]:
    return _from_first(among)[::-1]


def _from_edges(among: torch.Tensor) -> list[int]:
    """Keys, those nearest to an edge of their run of ``among`` first."""
    among = among.cpu()
    end = torch.ones(1, dtype=torch.bool)
    edge = torch.cat([end, among[1:] != among[:-1], end]).nonzero().flatten()
    key = torch.arange(len(among))
    after = torch.searchsorted(edge, key, right=True)
    distance = torch.minimum(key - edge[after - 1], edge[after] - 1 - key).tolist()
    return sorted(key[among].tolist(), key=lambda j: (distance[j], j))


def _list_keys(keys: list[int]) -> str:
    """Ascending ``keys`` in words; those in a row as one, but short runs key by key."""
    if len(keys) == 1:
        return f"key {keys[0]} is"
    parts = list(_ranges(keys))
    shown = ", ".join(
        str(part.start) if len(part) == 1 else f"{part.start}–{part.stop - 1}"
        for part in parts[:_NAMED]
    )
    left = sum(map(len, parts[_NAMED:]))
    more = f" and {left} more" if left else ""
    return f"keys {shown}{more} are"


def _ranges(keys: list[int]) -> Iterator[range]:
    runs: list[range] = []
    for key in keys:
        if runs and runs[-1].stop == key:
            runs[-1] = range(runs[-1].start, key + 1)
        else:
            runs.append(range(key, key + 1))
    for run in runs:
        yield from [run] if len(run) >= _RUN else [range(key, key + 1) for key in run]

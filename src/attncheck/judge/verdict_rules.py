"""Rules of a verdict, one by one, and the sentence each says.

In the order in which ``verdict`` asks them. None of them stops another: the first that fails gives
the verdict its name, and what the others have to add stands beside it as warnings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from attncheck.judge.allowance import Share, at_rows, largest, of_rows, place_of, share, shares
from attncheck.judge.head_precision import FAR, RESIDUAL, SPREAD, HeadPrecision, Z, gated

if TYPE_CHECKING:
    from attncheck.core.judgement import Place, Precision, Rule
    from attncheck.core.outputs import TensorName
    from attncheck.judge.allowance import Allowance
    from attncheck.judge.declared_arithmetic import Arithmetic

__all__ = [
    "PROVEN",
    "Compared",
    "Finding",
    "beyond",
    "bound",
    "element",
    "empty_rows",
    "finite",
    "imprecise",
    "improbable",
    "improbable_share",
    "number",
    "residual",
    "structure",
    "telling",
    "tile",
    "times",
    "unbounded",
    "unknown",
]


_DIGITS = 17  # a float64 is told apart by no more


def element(tensor: TensorName, place: Place) -> str:
    """An element as it is indexed: ``out[0, 3, 17, 5]``, ``lse[0, 3, 17]``."""
    return f"{tensor}{list(place.index(tensor))}"


def number(value: float, within: float) -> str:
    """``value`` with the digits that matter where ``within`` is allowed: two of it."""
    if not math.isfinite(value) or value == 0:
        return f"{value + 0.0:g}"  # −0 is 0
    if not (math.isfinite(within) and within > 0):
        return f"{value:.{_DIGITS}g}"
    digits = math.floor(math.log10(abs(value))) - math.floor(math.log10(within)) + 2
    return f"{value:#.{max(2, min(digits, _DIGITS))}g}".rstrip(".")


def times(size: float) -> str:
    """A ratio for reading: ``4.6``, ``159``, ``1.2e+05``."""
    return f"{size:.3g}" if size >= 100 else f"{size:.2g}"


def beyond(found: Share, of: str, whose: str) -> str:
    """What is beyond an allowance.

    Args:
        found: The largest share.
        of: What the allowance is called: ``the bound``.
        whose: What was compared: ``elements``.
    """
    allowed = found.allowance
    are = "is" if found.beyond == 1 else "are"
    said = f"({times(found.size)} × {of})" if math.isfinite(found.size) else "(no bound is met)"
    return (
        f"{element(found.tensor, found.place)} = {number(found.got, allowed)}, but should be "
        f"{number(found.exact, allowed)} ± {number(allowed, allowed)} {said}; "
        f"{found.beyond} of {found.elements} {whose} {are} beyond it"
    )


def tile(place: Place, tiles: tuple[int, int] | None, queries: int) -> str:
    """The query tile that an element lies in: ``query tile 3, rows 192–255``; empty without."""
    if tiles is None:
        return ""
    block = tiles[0]
    first = place.query // block * block
    return f"query tile {place.query // block}, rows {first}–{min(first + block, queries) - 1}"


PROVEN = 0.01
"""Part of an allowance that the exact result's own error may be: the oracle is exact beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule found.

    Attributes:
        status: ``fail``, ``inconclusive`` or ``warn``.
        rule: Which rule.
        text: One line.
        tensor: Which one it is about; of both, out.
        at: The element that shows it best; None where no single one does.
    """

    status: Literal["fail", "inconclusive", "warn"]
    rule: Rule
    text: str
    tensor: TensorName = "out"
    at: Place | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Compared:
    """One tensor beside the exact one, in the axes of ``judgement.AXES``.

    Attributes:
        name: Which one.
        got: What the kernel gave.
        exact, allowance: float64.
        alive: bool: elements of rows that see a key; of dk and dv those of keys that a row sees.
        counted: bool: those whose exact value is finite and whose allowance is not infinite.
        empty: What elements of other rows must be.
    """

    name: TensorName
    got: torch.Tensor
    exact: torch.Tensor
    allowance: torch.Tensor
    alive: torch.Tensor
    counted: torch.Tensor
    empty: float

    @classmethod
    def of(
        cls,
        name: TensorName,
        got: torch.Tensor,
        exact: torch.Tensor,
        allowance: torch.Tensor,
        alive: torch.Tensor,
    ) -> Compared:
        """``got`` beside ``exact``; ``alive`` may be without the last axis."""
        alive = alive[..., None].expand_as(exact) if alive.dim() < exact.dim() else alive
        return cls(
            name=name,
            got=got,
            exact=exact,
            allowance=allowance,
            alive=alive,
            counted=alive & exact.isfinite() & ~allowance.isinf(),
            empty=-math.inf if name == "lse" else 0.0,
        )

    def share(self) -> Share | None:
        """The largest share of the deterministic bound."""
        return share(self.name, self.got, self.exact, self.allowance, self.counted)

    def count(self) -> tuple[int, int]:
        """Elements that are not within their bound, and elements that were asked about."""
        error = self.got.to(torch.float64) - self.exact
        beyond = self.counted & ~(shares(error, self.allowance) <= 1)  # NaN is beyond
        wrong = beyond | (~self.alive & (self.got != self.empty))
        return int(wrong.sum()), int((self.counted | ~self.alive).sum())


def finite(compared: Compared) -> list[Finding]:
    """NaN or infinite where the exact result is finite.

    In a row without a finite allowance that is odd, and no more: a right kernel may overflow there.
    """
    broken = compared.alive & compared.exact.isfinite() & ~compared.got.isfinite()
    found = _first(compared, broken & compared.counted, "are NaN or infinite", "finite", "fail")
    odd = _first(compared, broken & ~compared.counted, "are NaN or infinite", "finite", "warn")
    return found + [one for one in odd if not found]


def empty_rows(compared: Compared) -> list[Finding]:
    """A row that sees no key is not exactly 0 in out, or not −∞ in LSE; NaN is neither.

    So are gradients: of the query of such a row, of a key and value that no row sees, and of a
    captured number that no row reads for a key that it sees.
    """
    wrong = ~compared.alive & (compared.got != compared.empty)
    whose = _EMPTY.get(compared.name, "rows that see no key")
    said = f"of {whose} are not exactly {compared.empty:g}"
    return _first(compared, wrong, said, "empty rows", "fail")


_EMPTY: dict[TensorName, str] = {
    **dict.fromkeys(("dk", "dv"), "keys that no row sees"),
    "dcaptured": "numbers that no row reads for a key that it sees",
}


def _first(
    compared: Compared,
    wrong: torch.Tensor,
    said: str,
    rule: Rule,
    status: Literal["fail", "warn"],
) -> list[Finding]:
    """A finding about the first of the ``wrong`` elements, if there is one."""
    count = int(wrong.sum())
    if not count:
        return []
    flat = int(wrong.reshape(-1).to(torch.int8).argmax())
    where = place_of(flat, wrong.shape)
    got, exact, allowed = (
        float(of.reshape(-1)[flat]) for of in (compared.got, compared.exact, compared.allowance)
    )
    asked = compared.alive if rule == "finite" else ~compared.alive
    should = number(exact if rule == "finite" else compared.empty, allowed)
    text = (
        f"{element(compared.name, where)} = {got:.6g}, but should be {should}; "
        f"{count} of {int(asked.sum())} elements {said}"
    )
    return [Finding(status=status, rule=rule, text=text, tensor=compared.name, at=where)]


def structure(found: str) -> list[Finding]:
    """What an exact probe found; nothing where that is empty."""
    return [Finding(status="fail", rule="structure", text=found)] if found else []


def bound(found: Share | None, oracle_share: float) -> list[Finding]:
    """Beyond the deterministic bound.

    What is beyond it by less than the exact result's own error may be is not proven.
    """
    if found is None or found.size <= 1:
        return []
    text = beyond(found, "the bound", _plural(found))
    if found.size > 1 + oracle_share:
        return [_of(found, "fail", "bound", text)]
    less = f"{text}, by less than the exact result's own error may be"
    return [_of(found, "inconclusive", "bound", less)]


def improbable_share(compared: Compared, allowance: Allowance) -> Share | None:
    """The largest share of the probabilistic bound over the sampled rows."""
    found = []
    for sample in allowance.samples:
        rows = sample.rows
        allowed = sample.probable_out if compared.name == "out" else sample.probable_lse
        counted = at_rows(rows, compared.counted) & ~allowed.isinf()
        parts = (at_rows(rows, compared.got), at_rows(rows, compared.exact), allowed, counted)
        one = share(compared.name, *(part[None] for part in parts))
        if one is not None:
            found.append(of_rows(one, rows, compared.exact.shape[1]))
    return largest(found)


def improbable(found: Share | None, *, generic: bool, proven: bool) -> list[Finding]:
    """Beyond the probabilistic bound: of independent roundings with a chance below 1e-6 a problem.

    Structured inputs can make roundings agree with each other: there it is a warning.
    """
    if found is None or found.size <= 1:
        return []
    text = beyond(found, "the probabilistic bound, p < 1e-6", f"sampled {_plural(found)}")
    if generic and proven:
        return [_of(found, "fail", "improbable", text)]
    why = "inputs have structure" if not generic else "the exact result is not proven enough"
    return [_of(found, "warn", "improbable", f"{text}; {why}")]


def _of(
    found: Share, status: Literal["fail", "inconclusive", "warn"], rule: Rule, text: str
) -> Finding:
    return Finding(status=status, rule=rule, text=text, tensor=found.tensor, at=found.place)


def unknown(compared: Compared, allowance: Allowance) -> list[Finding]:
    """Why it cannot be told whether the kernel is right, if it cannot."""
    found = []
    if not allowance.oracle_share <= PROVEN:
        text = (
            f"the exact result is proven to {allowance.oracle_share:.2g} of the least allowance, "
            f"but should be to {PROVEN:g}"
        )
        found.append(Finding(status="inconclusive", rule="", text=text))
    if bool(compared.alive.any()) and not bool(compared.counted.any()):
        at_jumps = f" ({allowance.jumps} scores lie at a jump of their mod)"
        text = (
            f"no row has a finite allowance{at_jumps if allowance.jumps else ''}: "
            "at these inputs a right kernel may give anything"
        )
        found.append(Finding(status="inconclusive", rule="", text=text))
    return found


def unbounded(compared: Compared) -> list[Finding]:
    """A gradient of which nothing can be said, as where a score lies at a jump of its mod."""
    if not bool(compared.alive.any()) or bool(compared.counted.any()):
        return []
    text = f"no element of {compared.name} has a finite allowance: a right kernel may give anything"
    return [Finding(status="inconclusive", rule="", text=text, tensor=compared.name)]


def telling(findings: list[Finding]) -> list[Finding]:
    """Those that say what no earlier one implies.

    An element that is NaN is beyond every bound, and what is beyond one bound is beyond a tighter
    one: after a tensor has failed, only other rows and a probe's answer are news of it.
    """
    failed: set[str] = set()
    told = []
    for one in findings:
        if one.tensor in failed and one.rule not in ("empty rows", "structure", ""):
            continue
        told.append(one)
        if one.status == "fail" and one.rule not in ("empty rows", "structure"):
            failed.add(one.tensor)
    return told


def _plural(found: Share) -> str:
    return "rows" if found.tensor == "lse" else "elements"


def imprecise(
    heads: HeadPrecision, arithmetic: Arithmetic, *, generic: bool, proven: bool
) -> list[Finding]:
    """Less accurate than ideal kernels and than predicted, in one head; one of the two is odd.

    Far less accurate than any ideal kernel is enough on generic inputs: the prediction takes errors
    that are equal for equal ones, and is large where they happen not to be.
    """
    if not gated(arithmetic):
        return []
    spread = torch.full_like(heads.z, math.nan) if heads.spread is None else heads.spread
    # Where an ideal kernel errs as much, a large z is the prediction's fault.
    usual = (spread > 0) & (spread <= 1)  # 0 where they are exact
    by_z, by_spread = (heads.z > Z) & ~usual, spread > SPREAD
    both = by_z & by_spread
    if generic:
        both = both | (spread > FAR)
    found = []
    for wrong, status in (
        (both, "fail" if proven else "warn"),
        ((by_z | by_spread) & ~both, "warn"),
    ):
        if bool(wrong.any()):
            found.append(_of_head(heads.z, spread, wrong, status))
    return found


def _of_head(z: torch.Tensor, spread: torch.Tensor, wrong: torch.Tensor, status: str) -> Finding:
    """A finding about the worst of the ``wrong`` heads."""
    by = torch.where(wrong, torch.fmax(z / Z, spread / SPREAD), -1.0)
    batch, head = divmod(int(by.argmax()), by.shape[1])
    parts = []
    if z[batch, head] > Z:
        parts.append(
            f"errors of head {[batch, head]} are {times(float(z[batch, head]))} × their "
            f"predicted size, but should be at most {Z:g} ×"
        )
    if spread[batch, head] > SPREAD:
        parts.append(
            f"RMSE of head {[batch, head]} is {times(float(spread[batch, head]))} × the "
            f"largest of ideal kernels', but should be at most {SPREAD:g} ×"
        )
    text = f"{'; '.join(parts)} ({int(wrong.sum())} of {wrong.numel()} heads)"
    return Finding(status="fail" if status == "fail" else "warn", rule="precision", text=text)


def residual(precision: Precision, arithmetic: Arithmetic, *, generic: bool) -> list[Finding]:
    """Farther from the emulation at its own tiling than right kernels are: odd.

    Of generic inputs alone: where a problem has few different roundings, one that falls the other
    way is a large part of the whole error.
    """
    gate = RESIDUAL.get(arithmetic.weights.name)
    if not generic or gate is None or precision.residual is None or precision.residual <= gate:
        return []
    text = (
        f"out differs from the ideal kernel at the same tiling by {times(precision.residual)} × "
        f"that kernel's error, but should by at most {gate:g} ×: it rounds elsewhere than declared"
    )
    return [Finding(status="warn", rule="precision", text=text)]

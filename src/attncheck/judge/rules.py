"""The rules of a verdict, one by one: what each finds wrong, odd, or not to be told.

In the order in which ``verdict`` asks them. None of them stops another: the first that fails gives
the verdict its name, and what the others have to add stands beside it as warnings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from attncheck.judge.sentences import beyond, element, number
from attncheck.judge.shares import Share, at, largest, of_rows, place, share, shares

if TYPE_CHECKING:
    from attncheck.judge.allowance import Allowance
    from attncheck.judgement import Place, Rule
    from attncheck.tensor_names import TensorName

__all__ = [
    "PROVEN",
    "Compared",
    "Finding",
    "bound",
    "empty_rows",
    "finite",
    "improbable",
    "improbable_share",
    "structure",
    "telling",
    "unbounded",
    "unknown",
]

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
    where = place(flat, wrong.shape)
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
        counted = at(rows, compared.counted) & ~allowed.isinf()
        parts = (at(rows, compared.got), at(rows, compared.exact), allowed, counted)
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

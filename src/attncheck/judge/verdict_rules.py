"""Rules of a verdict, in the order in which they are checked, and the sentence that each reports.

All rules are checked. The first that fails names the verdict; the others' findings are added as
warnings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.judgement import Place, Rule, share_text
from attncheck.core.tensor_names import TensorName
from attncheck.judge.allowance import (
    Allowance,
    Share,
    at_rows,
    largest_share,
    place_of,
    share_in_problem,
    share_of,
    shares,
)
from attncheck.judge.head_precision import (
    FAR,
    SPREAD,
    HeadPrecision,
    Residual,
    Z,
    can_fail_by_precision,
)

PROVEN = 0.01
"""Share of an allowance up to which the exact result's own error may be neglected."""

_DIGITS = 17  # Significant decimal digits that distinguish any two float64 numbers.
_EMPTY_ELEMENTS: dict[TensorName, str] = {
    "dk": "keys that no row sees",
    "dv": "keys that no row sees",
    "dcaptured": "numbers that no row reads for a key that it sees",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A failure or oddity that one rule found."""

    status: Literal["fail", "inconclusive", "warn"]
    rule: Rule
    text: str
    tensor: TensorName = "out"  # the tensor that it is about; out if it is about out and LSE
    at: Place | None = None  # the element that shows it best; None if no single one does


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ComparedTensor:
    """A kernel's tensor, the exact one and its allowance, in the axes of ``core.outputs.AXES``."""

    name: TensorName
    got: Tensor  # the kernel's result
    exact: Tensor  # float64
    allowance: Tensor  # float64
    # bool: elements of rows that see a key; in dk and dv elements of keys that a row sees.
    alive: Tensor
    counted: Tensor  # bool: alive elements with a finite exact value and a finite allowance
    empty: float  # the value that elements which are not alive must have

    @classmethod
    def of(
        cls, name: TensorName, got: Tensor, exact: Tensor, allowance: Tensor, alive: Tensor
    ) -> ComparedTensor:
        """Compare ``got`` with ``exact``; ``alive`` may lack the last axis."""
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

    def largest_share(self) -> Share | None:
        """Return the largest share of the deterministic bound."""
        return share_of(self.name, self.got, self.exact, self.allowance, self.counted)

    def count_wrong(self) -> tuple[int, int]:
        """Return the number of elements beyond their bound, and the number compared."""
        error = self.got.to(torch.float64) - self.exact
        beyond = self.counted & ~(shares(error, self.allowance) <= 1)  # NaN is beyond
        wrong = beyond | (~self.alive & (self.got != self.empty))
        return int(wrong.sum()), int((self.counted | ~self.alive).sum())

    def nothing_counted(self) -> bool:
        """Return whether some rows see keys but none of their elements has a finite allowance."""
        return bool(self.alive.any()) and not bool(self.counted.any())


def nonfinite(compared: ComparedTensor) -> list[Finding]:
    """Return findings of NaN or infinity where the exact result is finite.

    In a row without a finite allowance this is only a warning: a right kernel may overflow there.
    """
    broken = compared.alive & compared.exact.isfinite() & ~compared.got.isfinite()
    # One finding is enough: a failure makes the warning redundant.
    return _first_wrong(
        compared, broken & compared.counted, "are NaN or infinite", "finite", "fail"
    ) or _first_wrong(compared, broken & ~compared.counted, "are NaN or infinite", "finite", "warn")


def empty_rows(compared: ComparedTensor) -> list[Finding]:
    """Return findings of rows that see no key but are not exactly 0, or −∞ in LSE.

    Gradients must be 0 too: of the query of such a row, of a key and value that no row sees, and
    of a captured number that no row reads for a key that it sees.
    """
    # NaN is unequal to everything, so it counts as wrong.
    wrong = ~compared.alive & (compared.got != compared.empty)
    whose = _EMPTY_ELEMENTS.get(compared.name, "rows that see no key")
    text = f"of {whose} are not exactly {compared.empty:g}"
    return _first_wrong(compared, wrong, text, "empty rows", "fail")


def _first_wrong(
    compared: ComparedTensor, wrong: Tensor, text: str, rule: Rule, status: Literal["fail", "warn"]
) -> list[Finding]:
    """Return a finding about the first of the ``wrong`` elements, or none."""
    count = int(wrong.sum())
    if not count:
        return []
    flat = int(wrong.reshape(-1).to(torch.int8).argmax())
    where = place_of(flat, wrong.shape)
    got, exact, allowed = (
        float(of.reshape(-1)[flat]) for of in (compared.got, compared.exact, compared.allowance)
    )
    elements = compared.alive if rule == "finite" else ~compared.alive
    expected = number(exact if rule == "finite" else compared.empty, allowed)
    line = (
        f"{element(compared.name, where)} = {got:.6g}, but should be {expected}; "
        f"{count} of {int(elements.sum())} elements {text}"
    )
    return [Finding(status=status, rule=rule, text=line, tensor=compared.name, at=where)]


def structure(text: str) -> list[Finding]:
    """Return a finding with ``text``, the wrong answer to an exact probe; none if it is empty."""
    return [Finding(status="fail", rule="structure", text=text)] if text else []


def beyond_bound(share: Share | None, oracle_share: float) -> list[Finding]:
    """Return a finding of a share beyond the deterministic bound.

    It is inconclusive if the excess is below the largest error of the exact result itself.
    """
    if share is None or share.size <= 1:
        return []
    text = _beyond(share, "the bound", _noun(share))
    # |kernel − oracle| ≤ bound + |oracle − exact| for a right kernel.
    if share.size > 1 + oracle_share:
        return [_finding(share, "fail", "bound", text)]
    text = f"{text}, by less than the exact result's own error may be"
    return [_finding(share, "inconclusive", "bound", text)]


def improbable_share(compared: ComparedTensor, allowance: Allowance) -> Share | None:
    """Return the largest share of the probabilistic bound over the sampled rows."""
    parts = []
    for sample in allowance.samples:
        rows = sample.rows
        allowed = sample.probable_out if compared.name == "out" else sample.probable_lse
        # The bound is infinite where a row's errors are not independent, as at a jump.
        counted = at_rows(rows, compared.counted) & ~allowed.isinf()
        tensors = (at_rows(rows, compared.got), at_rows(rows, compared.exact), allowed, counted)
        share = share_of(compared.name, *(tensor[None] for tensor in tensors))
        if share is not None:
            parts.append(share_in_problem(share, rows, compared.exact.shape[1]))
    return largest_share(parts)


def improbable(share: Share | None, *, generic: bool, proven: bool) -> list[Finding]:
    """Return a finding of a share beyond the probabilistic bound: chance below 1e-6 per problem.

    It is only a warning for structured inputs, whose roundings may be correlated.
    """
    if share is None or share.size <= 1:
        return []
    text = _beyond(share, "the probabilistic bound, p < 1e-6", f"sampled {_noun(share)}")
    if generic and proven:
        return [_finding(share, "fail", "improbable", text)]
    why = "inputs have structure" if not generic else "the exact result is not proven enough"
    return [_finding(share, "warn", "improbable", f"{text}; {why}")]


def imprecise_heads(
    heads: HeadPrecision, arithmetic: Arithmetic, *, generic: bool, proven: bool
) -> list[Finding]:
    """Return findings of heads less accurate than ideal kernels, than predicted, or than both.

    Both fail a kernel; on generic inputs so does a head far less accurate than any ideal kernel:
    the prediction assumes that errors which may be equal are, and is large where they are not.
    """
    if not can_fail_by_precision(arithmetic):
        return []
    spread = torch.full_like(heads.z, math.nan) if heads.spread is None else heads.spread
    # If an ideal kernel errs as much, a large z only shows that the prediction is too small.
    ideal_errs_too = (spread > 0) & (spread <= 1)  # the spread is 0 if the ideal kernels are exact
    by_z, by_spread = (heads.z > Z) & ~ideal_errs_too, spread > SPREAD
    fails = by_z & by_spread
    if generic:
        # On other inputs ideal kernels may be exact by chance, which makes any ratio large.
        fails = fails | (spread > FAR)
    findings = []
    if bool(fails.any()):
        text = _imprecise_text(heads.z, spread, fails)
        findings.append(Finding(status="fail" if proven else "warn", rule="precision", text=text))
    odd = (by_z | by_spread) & ~fails
    if bool(odd.any()):
        text = _imprecise_text(heads.z, spread, odd)
        findings.append(Finding(status="warn", rule="precision", text=text))
    return findings


def _imprecise_text(z: Tensor, spread: Tensor, wrong: Tensor) -> str:
    """Return by how much the worst of the ``wrong`` heads is beyond either gate, in words."""
    by = torch.where(wrong, torch.fmax(z / Z, spread / SPREAD), -1.0)
    batch, head = divmod(int(by.argmax()), by.shape[1])
    parts = []
    if z[batch, head] > Z:
        parts.append(
            f"errors of head {[batch, head]} are {share_text(float(z[batch, head]), Z)} × their "
            f"predicted size, but should be at most {Z:g} ×"
        )
    if spread[batch, head] > SPREAD:
        parts.append(
            f"RMSE of head {[batch, head]} is {share_text(float(spread[batch, head]), SPREAD)} × "
            f"the largest of ideal kernels', but should be at most {SPREAD:g} ×"
        )
    return f"{'; '.join(parts)} ({int(wrong.sum())} of {wrong.numel()} heads)"


def residual(distance: Residual | None, *, generic: bool) -> list[Finding]:
    """Return a warning if out is farther from its emulation than those of right kernels.

    For generic inputs only: in a problem with few different roundings, a single one that falls the
    other way is a large part of the whole error.
    """
    if not generic or distance is None or distance.size <= distance.allowed:
        return []
    text = (
        "out differs from the ideal kernel at the same tiling by "
        f"{share_text(distance.size, distance.allowed)} × that kernel's error, but should by at "
        f"most {distance.allowed:.2g} ×: it rounds elsewhere than declared"
    )
    return [Finding(status="warn", rule="precision", text=text)]


def undecidable(out: ComparedTensor, allowance: Allowance) -> list[Finding]:
    """Return findings that make it undecidable whether the kernel is right."""
    texts = []
    if not allowance.oracle_share <= PROVEN:
        texts.append(
            f"the exact result is proven to {allowance.oracle_share:.2g} of the least allowance, "
            f"but should be to {PROVEN:g}"
        )
    if out.nothing_counted():
        jumps = f" ({allowance.jumps} scores lie at a jump of their mod)" if allowance.jumps else ""
        texts.append(
            f"no row has a finite allowance{jumps}: at these inputs a right kernel may give "
            "anything"
        )
    return [Finding(status="inconclusive", rule="", text=text) for text in texts]


def unbounded_gradient(compared: ComparedTensor) -> list[Finding]:
    """Return a finding of a gradient without a finite bound, as at a jump of a score mod."""
    if not compared.nothing_counted():
        return []
    text = f"no element of {compared.name} has a finite allowance: a right kernel may give anything"
    return [Finding(status="inconclusive", rule="", text=text, tensor=compared.name)]


def drop_implied(findings: list[Finding]) -> list[Finding]:
    """Return the findings that no earlier one implies.

    A NaN is beyond every bound, and an element beyond one bound is beyond each tighter one. After
    a tensor has failed, only findings of empty rows and of a probe add something about it.
    """
    # Tensor by tensor: a wrong out implies nothing about LSE.
    failed: set[str] = set()
    news = []
    for finding in findings:
        if finding.tensor in failed and finding.rule not in ("empty rows", "structure", ""):
            continue
        news.append(finding)
        if finding.status == "fail" and finding.rule not in ("empty rows", "structure"):
            failed.add(finding.tensor)
    return news


def _finding(
    share: Share, status: Literal["fail", "inconclusive", "warn"], rule: Rule, text: str
) -> Finding:
    return Finding(status=status, rule=rule, text=text, tensor=share.tensor, at=share.place)


def element(tensor: TensorName, place: Place) -> str:
    """Return an element's index expression: ``out[0, 3, 17, 5]``, ``lse[0, 3, 17]``."""
    return f"{tensor}{list(place.index(tensor))}"


def number(value: float, within: float) -> str:
    """Return ``value`` rounded to the second significant digit of its allowance ``within``."""
    # 0 and infinite numbers have no logarithm to count digits by.
    if not math.isfinite(value) or value == 0:
        return f"{value + 0.0:g}"  # −0 is 0
    if not (math.isfinite(within) and within > 0):
        return f"{value:.{_DIGITS}g}"
    digits = math.floor(math.log10(abs(value))) - math.floor(math.log10(within)) + 2
    # A number so large that no float64 has those digits is given by its first two.
    return f"{value:#.{max(2, digits) if digits <= _DIGITS else 2}g}".rstrip(".")


def tile(place: Place, tiles: tuple[int, int] | None, queries: int) -> str:
    """Return an element's tile, ``query tile 3, rows 192–255``; empty without ``tiles``."""
    if tiles is None:
        return ""
    block = tiles[0]
    first = place.query // block * block
    return f"query tile {place.query // block}, rows {first}–{min(first + block, queries) - 1}"


def _beyond(share: Share, bound: str, elements: str) -> str:
    """Return a sentence: a share is beyond ``bound``, with the number of such ``elements``."""
    allowed = share.allowance
    are = "is" if share.beyond == 1 else "are"
    size = (
        f"({share_text(share.size)} × {bound})"
        if math.isfinite(share.size)
        else "(no bound is met)"
    )
    return (
        f"{element(share.tensor, share.place)} = {number(share.got, allowed)}, but should be "
        f"{number(share.exact, allowed)} ± {number(allowed, allowed)} {size}; "
        f"{share.beyond} of {share.elements} {elements} {are} beyond it"
    )


def _noun(share: Share) -> str:
    return "rows" if share.tensor == "lse" else "elements"

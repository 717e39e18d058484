"""Verdict on a kernel's results: is the difference only rounding? Applies the rules in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import torch
from torch import Tensor

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.judgement import Judgement, Status, Worst
from attncheck.core.tensor_names import GRADIENTS, TensorName
from attncheck.judge import verdict_rules as rules
from attncheck.judge.allowance import Allowance, Share, at_rows, shares
from attncheck.judge.head_precision import HeadPrecision, measure_heads, measure_precision
from attncheck.judge.verdict_rules import ComparedTensor, Finding


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KernelResult:
    """The results, exact results and declared arithmetic that a verdict is based on.

    Raises:
        ValueError: for shapes that do not fit.
    """

    out: Tensor  # the kernel's, ``(batch, heads, query, value_dim)``, any floating dtype
    # The kernel's natural-log LSE, ``(batch, heads, query)``; None if it is not exposed.
    lse: Tensor | None
    exact_out: Tensor  # float64
    exact_lse: Tensor | None  # float64
    alive: Tensor  # bool, ``(batch, heads, query)``: rows that see a key
    allowance: Allowance  # largest rounding error of each element
    arithmetic: Arithmetic  # the profile that the allowance assumes
    # Whether the inputs are drawn without structure, so that roundings are independent.
    generic: bool
    keys: int = 1  # number of keys
    # ``(block_query, block_kv)`` of the kernel's declared tiling; None if it declares none.
    tiles: tuple[int, int] | None = None
    structure: str = ""  # fault that an exact probe shows, in one line; empty if it shows none
    # out of the ideal kernel at that tiling, or at its default one; shape of ``out``.
    ideal: Tensor | None = None
    gradients: tuple[ComparedTensor, ...] = ()  # of a Problem with a backward, with the exact ones

    def __post_init__(self) -> None:
        # The executor rejects results of wrong shapes, so a wrong one here is a bug of attncheck.
        shape = self.exact_out.shape
        shapes = {"out": (self.out, shape), "alive": (self.alive, shape[:-1])}
        if self.lse is not None:
            shapes["lse"] = (self.lse, shape[:-1])
        for name, (tensor, wanted) in shapes.items():
            if tensor.shape != wanted:
                raise ValueError(
                    f"{name}.shape={tuple(tensor.shape)}, but should be {tuple(wanted)}."
                )

    def forward(self) -> list[ComparedTensor]:
        """Return out, and LSE if the kernel exposes it, each with the exact one."""
        out, lse = self.allowance.out, self.allowance.lse
        both = [ComparedTensor.of("out", self.out, self.exact_out, out, self.alive)]
        if self.lse is not None and self.exact_lse is not None:
            both.append(ComparedTensor.of("lse", self.lse, self.exact_lse, lse, self.alive))
        return both


def judge_heads(result: KernelResult) -> HeadPrecision:
    """Measure the accuracy of every head; if it ``needs_ensemble`` the verdict needs one too."""
    # Heads are judged by out alone: LSE has its own bound and no ensemble.
    counted = result.forward()[0].counted
    return measure_heads(
        result.out,
        result.exact_out,
        counted,
        result.allowance,
        result.arithmetic,
        result.ideal,
        own_tiling=result.tiles is not None,
        keys=result.keys,
    )


def heads_with_ensemble(
    result: KernelResult, heads: HeadPrecision, outs: Iterable[Tensor]
) -> HeadPrecision:
    """Compare ``heads`` with ``outs`` of ideal kernels at several tilings."""
    return heads.with_ensemble(outs, result.exact_out, result.forward()[0].counted)


def needs_other_orders(result: KernelResult, heads: HeadPrecision) -> bool:
    """Return whether a verdict needs the ideal kernel with its operations in another order."""
    # The residual rule applies to generic inputs only.
    residual = heads.residual
    return residual is not None and result.generic and residual.size > residual.allowed


def heads_with_other_order(
    result: KernelResult, heads: HeadPrecision, out: Tensor
) -> HeadPrecision:
    """Compare the residual of ``heads`` with ``out`` of the ideal kernel in another order."""
    assert heads.residual is not None, "asked for where there is no residual"
    assert result.ideal is not None, "the residual was measured with it"
    counted = result.forward()[0].counted
    residual = heads.residual.with_other_order(out, result.ideal, counted)
    return replace(heads, residual=residual)


def decide(result: KernelResult, heads: HeadPrecision) -> Judgement:
    """Judge a kernel's results: return the first rule that fails, and all measurements.

    The rules in their order: finite, empty rows, structure, the deterministic bound of out, LSE and
    the gradients, the probabilistic bound of out and LSE, precision, residual; see
    ``verdict_rules``. Without a failure the verdict is ``inconclusive`` if the exact result is not
    proven far enough or no row can be judged, else ``warn`` if something is odd, else ``pass``.

    Args:
        heads: From ``judge_heads``, with the ensemble if they need one, and with the ideal kernel
            in other orders.

    Returns:
        The Judgement, without its blind spot, the parts of its worst allowance
        (``Worst.budget``) and ``lse_also_within``: they are costly, and callers add them on demand.
    """
    allowance, arithmetic, alive = result.allowance, result.arithmetic, result.alive
    both = result.forward()
    precision = measure_precision(result.out, result.exact_out, both[0].counted, heads, arithmetic)
    tensors = [*both, *result.gradients]
    bounds = {one.name: one.largest_share() for one in tensors}
    probable = {one.name: rules.improbable_share(one, allowance) for one in both}
    # Beyond this share the exact result itself is in doubt and cannot prove a failure.
    proven, generic = allowance.oracle_share <= rules.PROVEN, result.generic
    # All rules run: findings of later ones become warnings.
    findings = [
        *(rules.nonfinite(one) for one in tensors),
        *(rules.empty_rows(one) for one in tensors),
        rules.structure(result.structure),
        *(rules.beyond_bound(share, allowance.oracle_share) for share in bounds.values()),
        *(rules.improbable(s, generic=generic, proven=proven) for s in probable.values()),
        rules.imprecise_heads(heads, arithmetic, generic=generic, proven=proven),
        rules.residual(heads.residual, generic=generic),
        rules.undecidable(tensors[0], allowance),
        *(rules.unbounded_gradient(one) for one in tensors if one.name in GRADIENTS),
    ]
    status, first, others = _summarize(rules.drop_implied([f for rule in findings for f in rule]))
    worst = _find_worst(first, tensors, bounds, result.tiles)
    wrong, compared = next(
        (one.count_wrong() for one in tensors if worst and one.name == worst.tensor), (0, 0)
    )
    gradient_sizes = {
        name: share.size
        for name, share in bounds.items()
        if name in GRADIENTS and share is not None
    }
    return Judgement(
        status=status,
        rule=first.rule if first else "",
        reason=first.text if first else "",
        warnings=(*(one.text for one in others), *_partial_warnings(result.gradients)),
        out_over_bound=_size(bounds["out"]),
        lse_over_bound=_size(bounds.get("lse")),
        out_over_probable=_size(probable["out"]),
        lse_over_probable=_size(probable.get("lse")),
        gradients_over_bound=gradient_sizes if result.gradients else msgspec.UNSET,
        worst=worst,
        wrong=wrong,
        compared=compared,
        rows=int(alive.sum()),
        rows_sampled=sum(int(at_rows(s.rows, alive).sum()) for s in allowance.samples),
        rows_unbounded=int((alive & ~both[0].counted.any(-1)).sum()),
        jumps=allowance.jumps,
        precision=precision,
        arithmetic=str(arithmetic),
    )


def _summarize(findings: list[Finding]) -> tuple[Status, Finding | None, list[Finding]]:
    """Return the status, the finding that it is based on, and the other findings."""
    statuses: tuple[Literal["fail", "inconclusive", "warn"], ...]
    # Gravest first: a failure decides even if a warning comes before it.
    statuses = ("fail", "inconclusive", "warn")
    for status in statuses:
        for first in findings:
            if first.status == status:
                return status, first, [one for one in findings if one is not first]
    return "pass", None, []


def _size(share: Share | None) -> float | None:
    return None if share is None else share.size


def _partial_warnings(gradients: Iterable[ComparedTensor]) -> list[str]:
    """Return a line for each gradient of which some, but not all, elements have no finite bound."""
    counts = [(one.name, int(one.alive.sum()), int(one.counted.sum())) for one in gradients]
    return [
        f"not judged: {alive - counted} of {alive} elements of {name} have no finite bound"
        for name, alive, counted in counts
        # If no element has one, ``unbounded_gradient`` reports it.
        if 0 < counted < alive
    ]


def _find_worst(
    first: Finding | None,
    tensors: list[ComparedTensor],
    bounds: Mapping[TensorName, Share | None],
    tiles: tuple[int, int] | None,
) -> Worst | None:
    """Return the element that the verdict is based on, or else the one of the largest share."""
    if first is not None and first.at is not None:
        tensor, place = first.tensor, first.at
    else:
        some = [share for share in bounds.values() if share is not None]
        if not some:
            return None
        most = max(some, key=lambda share: share.size)
        tensor, place = most.tensor, most.place
    one = next(one for one in tensors if one.name == tensor)
    index = place.index(tensor)
    # Only these tensors have the query axis, which tiles divide.
    has_rows = tensor in ("out", "lse", "dq")
    return Worst(
        tensor=tensor,
        at=place,
        tile=rules.tile(place, tiles, one.exact.shape[2]) if has_rows else "",
        got=float(one.got[index]),
        exact=float(one.exact[index]),
        allowance=float(one.allowance[index]),
        budget={},
    )


def first_tighter_profile(result: KernelResult, allowances: Mapping[str, Tensor]) -> str:
    """Return the first of other, tighter profiles whose bound LSE also meets; "" if none.

    Args:
        allowances: Description of a profile → its allowance of LSE, ``(batch, heads, query)``.
    """
    both = result.forward()
    if len(both) == 1 or not bool(both[1].counted.any()):
        return ""
    lse = both[1]
    # Errors in float64: the difference of two fp32 numbers rounds.
    error = lse.got.to(torch.float64) - lse.exact
    for profile, allowed in allowances.items():
        if not bool((shares(error, allowed) > 1)[lse.counted].any()):
            return profile
    return ""

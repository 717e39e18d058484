"""Verdict on a kernel's outputs: the rules in their order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from attncheck.core.judgement import Judgement, Place, Worst
from attncheck.core.outputs import GRADIENTS
from attncheck.judge import verdict_rules
from attncheck.judge.allowance import Share, at_rows, shares
from attncheck.judge.head_precision import HeadPrecision, measure_heads, measure_precision
from attncheck.judge.verdict_rules import Compared, Finding, tile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from attncheck.core.judgement import BlindSpot, Precision, Status
    from attncheck.core.outputs import Outputs, TensorName
    from attncheck.judge.allowance import Allowance
    from attncheck.judge.declared_arithmetic import Arithmetic

    Budget = Callable[[TensorName, Place], dict[str, float]]

__all__ = ["decide"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Facts:
    """What the rules look at: tensors, their largest shares of either bound, precision."""

    tensors: list[Compared]
    bounds: dict[TensorName, Share | None]
    probable: dict[TensorName, Share | None]
    heads: HeadPrecision
    precision: Precision


def decide(  # noqa: PLR0913 - all that a verdict rests on, each by its name
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    truth: Outputs,
    alive: torch.Tensor,
    allowance: Allowance,
    arithmetic: Arithmetic,
    generic: bool,
    blind_spot: BlindSpot | None,
    tiles: tuple[int, int] | None = None,
    structure: str = "",
    ideal: torch.Tensor | None = None,
    ensemble: Callable[[], Iterable[torch.Tensor]] | None = None,
    budget: Budget | None = None,
    other_lse: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    gradients: Sequence[Compared] = (),
) -> Judgement:
    """The verdict on what a kernel gave: the first rule that fails, and every fact.

    The rules in their order: finite, empty rows, structure, the deterministic bound of out, LSE and
    the gradients, the probabilistic bound of out and LSE, precision, residual; see ``rules``.
    Without a failure the verdict is ``inconclusive`` where the exact result is not proven far
    enough or no row can be asked about, else ``warn`` where something is odd, else ``pass``.

    Args:
        out: As the kernel gave it, ``(batch, heads, query, value_dim)``, any floating dtype.
        lse: Natural-log LSE as the kernel gave it, ``(batch, heads, query)``; None where it is not
            exposed.
        truth: The exact result, float64.
        alive: bool, ``(batch, heads, query)``: rows that see a key.
        allowance: What rounding may cost, element by element.
        arithmetic: The profile that the allowance assumes.
        generic: Whether the inputs are drawn without structure, so that roundings are independent.
        blind_spot: What this problem would not have shown.
        tiles: ``(block_query, block_kv)`` of the kernel's declared tiling, where it declares one.
        structure: What an exact probe found wrong, in one line; empty where nothing.
        ideal: out of the ideal kernel at that tiling, or at its default one; shape of ``out``.
        ensemble: outs of ideal kernels at several tilings; asked for only where a head is suspect.
        budget: What the allowance of an element is made of; asked for once.
        other_lse: A profile in words → its allowance of LSE, ``(batch, heads, query)``, for tighter
            profiles than the one assumed; asked for where LSE is exposed.
        gradients: Each beside the exact one, of a Problem with a backward.

    Raises:
        ValueError: for shapes that do not fit.
    """
    _fitting(out, lse, truth, alive)
    both = _compared(out, lse, truth, alive, allowance)
    parts = {"out": out, "truth": truth.out, "counted": both[0].counted}
    by_head = measure_heads(
        **parts, allowance=allowance, arithmetic=arithmetic, ideal=ideal, ensemble=ensemble
    )
    emulation = ideal if tiles else None
    precision = measure_precision(
        **parts, found=by_head, emulation=emulation, arithmetic=arithmetic
    )
    tensors = [*both, *gradients]
    facts = _Facts(
        tensors=tensors,
        bounds={one.name: one.share() for one in tensors},
        probable={one.name: verdict_rules.improbable_share(one, allowance) for one in both},
        heads=by_head,
        precision=precision,
    )
    findings = _findings(facts, allowance, arithmetic, structure=structure, generic=generic)
    status, first, others = _summary(findings)
    worst = _worst(first, facts, tiles, budget)
    wrong, compared = next(
        (one.count() for one in tensors if worst and one.name == worst.tensor), (0, 0)
    )
    return Judgement(
        status=status,
        rule=first.rule if first else "",
        reason=first.text if first else "",
        warnings=(*(one.text for one in others), *_not_judged(gradients)),
        out_over_bound=_size(facts.bounds["out"]),
        lse_over_bound=_size(facts.bounds.get("lse")),
        out_over_probable=_size(facts.probable["out"]),
        lse_over_probable=_size(facts.probable.get("lse")),
        gradients_over_bound=_of_gradients(facts) if gradients else msgspec.UNSET,
        worst=worst,
        wrong=wrong,
        compared=compared,
        rows=int(alive.sum()),
        rows_sampled=_sampled(allowance, alive),
        rows_unbounded=int((alive & ~both[0].counted.any(-1)).sum()),
        jumps=allowance.jumps,
        precision=precision,
        blind_spot=blind_spot,
        arithmetic=str(arithmetic),
        lse_also_within=_also_within(both, other_lse),
    )


def _fitting(
    out: torch.Tensor, lse: torch.Tensor | None, truth: Outputs, alive: torch.Tensor
) -> None:
    """Shapes are the executor's to refuse; what gets here with others is a mistake of ours."""
    shapes = {"out": (out, truth.out.shape), "alive": (alive, truth.out.shape[:-1])}
    if lse is not None:
        shapes["lse"] = (lse, truth.out.shape[:-1])
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            raise ValueError(f"{name}.shape={tuple(tensor.shape)}, but should be {tuple(shape)}.")


def _compared(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    truth: Outputs,
    alive: torch.Tensor,
    allowance: Allowance,
) -> list[Compared]:
    """out, and LSE where the kernel exposes it."""
    both = [Compared.of("out", out, truth.out, allowance.out, alive)]
    if lse is not None and truth.lse is not None:
        both.append(Compared.of("lse", lse, truth.lse, allowance.lse, alive))
    return both


def _findings(
    facts: _Facts, allowance: Allowance, arithmetic: Arithmetic, *, structure: str, generic: bool
) -> list[Finding]:
    """What the rules find, in their order."""
    proven = allowance.oracle_share <= verdict_rules.PROVEN
    found = [
        *(verdict_rules.finite(one) for one in facts.tensors),
        *(verdict_rules.empty_rows(one) for one in facts.tensors),
        verdict_rules.structure(structure),
        *(verdict_rules.bound(one, allowance.oracle_share) for one in facts.bounds.values()),
        *(
            verdict_rules.improbable(s, generic=generic, proven=proven)
            for s in facts.probable.values()
        ),
        verdict_rules.imprecise(facts.heads, arithmetic, generic=generic, proven=proven),
        verdict_rules.residual(facts.precision, arithmetic, generic=generic),
        verdict_rules.unknown(facts.tensors[0], allowance),
        *(verdict_rules.unbounded(one) for one in facts.tensors if one.name in GRADIENTS),
    ]
    return verdict_rules.telling([one for of_a_rule in found for one in of_a_rule])


def _summary(findings: list[Finding]) -> tuple[Status, Finding | None, list[Finding]]:
    """The status, the finding that it rests on, and the others."""
    statuses: tuple[Literal["fail", "inconclusive", "warn"], ...]
    statuses = ("fail", "inconclusive", "warn")
    for status in statuses:
        for first in findings:
            if first.status == status:
                return status, first, [one for one in findings if one is not first]
    return "pass", None, []


def _size(found: Share | None) -> float | None:
    return None if found is None else found.size


def _not_judged(gradients: Sequence[Compared]) -> list[str]:
    """Which gradients nothing was asked of in part, one line each."""
    counts = [(one.name, int(one.alive.sum()), int(one.counted.sum())) for one in gradients]
    return [
        f"not judged: {alive - counted} of {alive} elements of {name} have no finite bound"
        for name, alive, counted in counts
        if 0 < counted < alive
    ]


def _of_gradients(facts: _Facts) -> dict[TensorName, float]:
    """Largest shares of the gradients' bounds."""
    found = {name: facts.bounds[name] for name in facts.bounds if name in GRADIENTS}
    return {name: one.size for name, one in found.items() if one is not None}


def _sampled(allowance: Allowance, alive: torch.Tensor) -> int:
    """Rows that see a key among the sampled ones."""
    return sum(int(at_rows(sample.rows, alive).sum()) for sample in allowance.samples)


def _worst(
    first: Finding | None,
    facts: _Facts,
    tiles: tuple[int, int] | None,
    budget: Budget | None,
) -> Worst | None:
    """The element that the verdict rests on, or else that of the largest share."""
    if first is not None and first.at is not None:
        tensor, where = first.tensor, first.at
    else:
        found = [one for one in facts.bounds.values() if one is not None]
        if not found:
            return None
        most = max(found, key=lambda one: one.size)
        tensor, where = most.tensor, most.place
    one = next(one for one in facts.tensors if one.name == tensor)
    index = where.index(tensor)
    allowed = float(one.allowance[index])
    bounded = math.isfinite(allowed) and allowed > 0
    return Worst(
        tensor=tensor,
        at=where,
        tile=tile(where, tiles, one.exact.shape[2]) if tensor in ("out", "lse", "dq") else "",
        got=float(one.got[index]),
        exact=float(one.exact[index]),
        allowance=allowed,
        budget=budget(tensor, where) if budget is not None and bounded else {},
    )


def _also_within(
    both: list[Compared], other_lse: Callable[[], Mapping[str, torch.Tensor]] | None
) -> str:
    """The first of other profiles that LSE satisfies too."""
    if other_lse is None or len(both) == 1 or not bool(both[1].counted.any()):
        return ""
    lse = both[1]
    for profile, allowed in other_lse().items():
        error = lse.got.to(torch.float64) - lse.exact
        if not bool((shares(error, allowed) > 1)[lse.counted].any()):
            return profile
    return ""

"""Exact quantities of rows that error bounds are computed from, as provided by the oracles."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from attncheck.core.declared_arithmetic import Arithmetic

Others = TypeVarTuple("Others")
Step = TypeVar("Step")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some query rows of some heads."""

    heads: range  # (batch, head) pairs, numbered batch · heads + head; axis ``heads`` below.
    query: torch.Tensor  # int64 indices of query rows, for every head; axis ``rows`` below.

    def index(self, at: Sequence[int], heads: int) -> tuple[int, ...]:
        """Return the index in a whole tensor of ``heads`` heads of an element ``at`` these rows."""
        head, row, *dim = at
        return (*divmod(self.heads[head], heads), int(self.query[row]), *dim)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Conditions:
    """Exact quantities of some rows, float64, with every key of the problem.

    A sink is an additional last key, so that kv below is larger by 1: its k and v are 0, and every
    row sees it.
    """

    rows: Rows
    # ``(heads, rows, head_dim)``; for fp8 the stored numbers times their descale.
    q: torch.Tensor
    # ``(heads, kv, head_dim)``, repeated for the query heads of a key head; 0 where not finite.
    k: torch.Tensor
    # ``(heads, kv, value_dim)``; 0 where not finite: rows that see such a value have a result that
    # is not finite either.
    v: torch.Tensor
    scale: float
    # ``scale · q·k``, ``(heads, rows, kv)``; the scores of a softmax. 0 where the mask hides the
    # key, and in place of −∞.
    products: torch.Tensor
    scores: torch.Tensor  # After the score mod; 0 where not seen; the logit for a sink.
    seen: torch.Tensor  # bool: whether the mask shows the key and its score is not −∞.
    maximum: torch.Tensor  # Maximum of the seen scores, ``(heads, rows)``; 0 in rows without keys.
    total: torch.Tensor  # Σ exp(score − maximum) over the seen keys; 0 in rows that see no key.
    out: torch.Tensor  # ``(heads, rows, value_dim)``; for a softmax ``(heads, rows, kv)``.
    lse: torch.Tensor  # ``(heads, rows)``; −∞ in rows that see no key.
    # Whether the scores are inputs, as in a softmax: q, k and v are empty then, with a last axis of
    # size 0.
    given_scores: bool = False
    has_score_mod: bool = False  # Whether a score mod is applied to the products.
    has_sink: bool = False  # Whether the last key is a sink.
    # Number of keys that each row sees, float64 ``(heads, rows, 1)``.
    count: torch.Tensor = field(init=False, repr=False)
    # Cached results of functions of these Conditions: see ``kept_step``.
    steps: list[_KeptStep] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        # Computed once, since most steps need the counts and a pass over all pairs is slow.
        object.__setattr__(self, "count", self.seen.sum(-1, keepdim=True).double())

    @property
    def keys(self) -> int:
        """Number of keys, including a sink."""
        return self.seen.shape[-1]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightedRows:
    """Terms of sums over the keys of some rows, float64; without a score mod and a sink.

    kv below is the number of keys up to the last one that any of the rows sees.
    """

    # q, k, v, scale: see Conditions; k and v of every key.
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    weights: torch.Tensor  # exp(score − maximum), ``(heads, rows, kv)``; 0 where not seen.
    hidden: torch.Tensor | None  # bool, ``(heads, rows, kv)``: keys not seen; None for none.
    # count to lse: see Conditions.
    count: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowTotals:
    """Totals of some rows over their keys, from which lower limits of bounds follow; float64.

    For attention without a score mod and a sink. P are the softmax weights; means are weighted by
    P.
    """

    # See Conditions.
    keys: int
    scale: float
    head_dim: int
    count: torch.Tensor  # ``(heads, rows, 1)``
    maximum: torch.Tensor  # ``(heads, rows)``
    total: torch.Tensor  # ``(heads, rows)``
    out: torch.Tensor  # ``(heads, rows, value_dim)``
    lse: torch.Tensor
    # Σ P as computed in float64, 1 up to rounding, and the largest P, ``(heads, rows, 1)``.
    weight: torch.Tensor
    peak: torch.Tensor
    # Mean, least and largest Σ_d |q_d k_d| over the keys that a row sees, ``(heads, rows, 1)``.
    size: torch.Tensor
    least_size: torch.Tensor
    largest_size: torch.Tensor
    mean_value: torch.Tensor  # mean of |v|, ``(heads, rows, value_dim)``
    spread: torch.Tensor  # lower bound of v's standard deviation, ``(heads, rows, value_dim)``
    # largest_query, largest_key, largest_value: largest |q|, |k| and |v| of the problem, ``()``.
    largest_query: torch.Tensor
    largest_key: torch.Tensor
    largest_value: torch.Tensor
    has_sink: bool = False  # Always False; for functions that also take Conditions.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GradientConditions:
    """Further exact quantities of some rows, for bounds of gradients; float64.

    As in Conditions a sink is the last key; its value product is 0 and its slope 1.
    """

    known: Conditions  # Quantities of the forward, with every key of the problem.
    dout: torch.Tensor  # The loss's gradient with respect to out, ``(heads, rows, value_dim)``.
    dlse: torch.Tensor  # Its gradient with respect to LSE, ``(heads, rows)``; 0 without keys.
    # Separate from dx, since a kernel rounds delta before it is subtracted.
    delta: torch.Tensor  # ``Σ dout · out``, ``(heads, rows)``; 0 in rows that see no key
    value_products: torch.Tensor  # ``dout · v``, ``(heads, rows, kv)``
    # The score mod's derivative at the products, ``(heads, rows, kv)``; 0 where not seen.
    slope: torch.Tensor
    # Gradient with respect to the products, ``P (value_products − delta + dlse) slope``,
    # ``(heads, rows, kv)``; 0 where not seen.
    dx: torch.Tensor
    dq: torch.Tensor  # gradient with respect to q, ``(heads, rows, head_dim)``


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreModError:
    """Errors after a score mod, inherited from the score and its own; ``(heads, rows, kv)``.

    A sink is left out, since score mods do not apply to it.
    """

    # Largest |mod evaluated in fp32 on a score within its error − exact mod|, on both sides of a
    # jump; infinite where unknown, as where a kernel may see a key that the mod hides or the other
    # way round. 0 where the mask hides the key.
    radius: torch.Tensor
    own: torch.Tensor  # The error at the exact score: the mod's own rounding error.
    jump: torch.Tensor  # bool: a jump of the mod lies within the score's error.
    # falls, likely: None where not needed, since each costs another evaluation of the mod.
    # bool: the mod's derivative is negative, so that a common error of a row's scores changes sign.
    falls: torch.Tensor | None = None
    # ``radius`` for score errors of likely size; for a curved mod it does not scale with the error.
    likely: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadConditions:
    """One place in a score mod's text that reads captured tensors, ``(heads, rows, kv)``.

    A sink is left out, since score mods do not apply to it.
    """

    place: torch.Tensor  # Index of the number that is read among all captured numbers, int64.
    # The score mod's derivative with respect to that number, float64; 0 where not seen.
    slope: torch.Tensor
    error: ScoreModError  # Possible error of a kernel's derivative.


@dataclass(frozen=True, slots=True, eq=False)
class _KeptStep:
    """A cached result of a step of a bound, and its arguments besides the Conditions."""

    function: Callable[..., Any]
    others: tuple[Any, ...]  # Arguments after the arithmetic.
    read: dict[str, Any]  # Fields of the arithmetic that the function has read.
    result: Any

    def answers(
        self, function: Callable[..., Any], arithmetic: Arithmetic, others: tuple[Any, ...]
    ) -> bool:
        """Return whether a call with these arguments would give this result."""
        return (
            self.function is function
            and all(map(_same, self.others, others))
            and all(getattr(arithmetic, name) == value for name, value in self.read.items())
        )


def _same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, float) and one == other)


class _RecordedArithmetic:
    """A proxy of an Arithmetic that records which fields are read."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self.fields_read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = self.fields_read[name] = getattr(self._arithmetic, name)
        return value


def kept_step(
    function: Callable[[Conditions, Arithmetic, *Others], Step],
) -> Callable[[Conditions, Arithmetic, *Others], Step]:
    """Return ``function`` with a cache of its results in the Conditions; called by position.

    The kernels of one case have similar arithmetics, and most steps of their bounds do not read the
    differences: a result is reused for every arithmetic that is equal in the fields that were read.
    Results must not be modified. Further arguments must be identical objects, or equal floats.
    """

    @functools.wraps(function)
    def kept(conditions: Conditions, arithmetic: Arithmetic, *others: *Others) -> Step:
        for step in conditions.steps:
            if step.answers(function, arithmetic, others):
                known: Step = step.result
                return known
        recorded: Any = _RecordedArithmetic(arithmetic)
        result = function(conditions, recorded, *others)
        conditions.steps.append(_KeptStep(function, others, recorded.fields_read, result))
        return result

    return kept

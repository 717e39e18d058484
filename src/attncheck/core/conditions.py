"""Exact quantities of rows that the bounds need: oracles compute them, the judge reads them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from attncheck.core.declared_arithmetic import Arithmetic

Others = ParamSpec("Others")
Step = TypeVar("Step")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some query rows of some heads."""

    heads: range  # (batch, head) pairs, numbered batch · heads + head; axis ``heads`` below
    query: torch.Tensor  # int64 indices of query rows, the same of every head; axis ``rows`` below


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Conditions:
    """Exact quantities of some rows, float64, with every key of the problem.

    A sink is a key like any, after the last: its k and v are 0, and every row sees it. kv below is
    one more then.
    """

    rows: Rows
    # ``(heads, rows, head_dim)`` as meant: fp8's stored numbers times their descale.
    q: torch.Tensor
    # ``(heads, kv, head_dim)``, each head with its own kv head's; 0 where it is not finite.
    k: torch.Tensor
    # ``(heads, kv, value_dim)``; 0 where it is not finite: the rows that see such a value have a
    # result that is not finite either.
    v: torch.Tensor
    scale: float
    # ``scale · q·k``, ``(heads, rows, kv)``; of a softmax its scores. 0 where the mask hides the
    # key, and in place of −∞.
    products: torch.Tensor
    scores: torch.Tensor  # After the score mod; 0 where not seen. Of a sink the logit itself.
    seen: torch.Tensor  # bool: what the mask shows and the score mod does not make −∞
    maximum: torch.Tensor  # of the seen scores, ``(heads, rows)``; 0 in rows that see no key
    total: torch.Tensor  # Σ exp(score − maximum) over the seen keys; 0 in rows that see no key
    out: torch.Tensor  # ``(heads, rows, value_dim)``; of a softmax ``(heads, rows, kv)``
    lse: torch.Tensor  # ``(heads, rows)``; −∞ in rows that see no key
    # Whether the scores were inputs (a softmax): q, k and v are empty then, their last axis is 0,
    # and nothing was multiplied.
    # Of a softmax or an attention without mod and sink, the usual case, nothing more is said.
    given_scores: bool = False
    has_score_mod: bool = False  # whether a score mod stands between products and scores
    has_sink: bool = False  # whether the last key is a sink
    sees_all: bool = False  # whether it is known that every row sees every key
    # How many keys each row sees, float64 ``(heads, rows, 1)``.
    count: torch.Tensor = field(init=False, repr=False)
    # What steps of bounds have made of these rows: see ``kept_step``. No other rows' ever.
    steps: list[_KeptStep] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        # Most steps count them, and the pass over all pairs is as long as any.
        object.__setattr__(self, "count", self.seen.sum(-1, keepdim=True).double())

    @property
    def keys(self) -> int:
        """Keys of the problem, and one more where there is a sink."""
        return self.seen.shape[-1]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightedRows:
    """What sums over the keys of some rows are made of, float64; no score mod, and no sink.

    kv below ends with the last key that one of the rows sees.
    """

    # As of Conditions, k and v of every key.
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    weights: torch.Tensor  # exp(score − maximum), ``(heads, rows, kv)``; 0 where not seen
    hidden: torch.Tensor | None  # bool, likewise: what is not seen; None: no mask hides anything
    # As of Conditions.
    count: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowTotals:
    """What is kept of some rows' Conditions for floors of bounds: nothing of single keys; float64.

    Of an attention without a score mod and without a sink. P are its softmax weights; means are
    weighted by them.
    """

    # As of Conditions.
    keys: int
    scale: float
    head_dim: int
    count: torch.Tensor  # ``(heads, rows, 1)``
    maximum: torch.Tensor  # ``(heads, rows)``
    total: torch.Tensor  # likewise
    out: torch.Tensor  # ``(heads, rows, value_dim)``
    lse: torch.Tensor
    # Σ P as float64 has it, 1 but for roundings, and the largest P, ``(heads, rows, 1)``.
    weight: torch.Tensor
    peak: torch.Tensor
    # Mean, least and largest Σ_d |q_d k_d| over the keys that a row sees, ``(heads, rows, 1)``.
    size: torch.Tensor
    least_size: torch.Tensor
    largest_size: torch.Tensor
    mean_value: torch.Tensor  # mean of |v|, ``(heads, rows, value_dim)``
    spread: torch.Tensor  # standard deviation of v, at least, likewise
    largest_query: torch.Tensor  # |q|, of the problem, ``()``
    largest_key: torch.Tensor  # |k|
    largest_value: torch.Tensor  # |v|
    # Never: of what is said of Conditions too.
    has_sink: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GradientConditions:
    """Exact quantities of some rows that bounds of gradients need besides; float64.

    As in Conditions a sink is the last key; its value product is 0 and its slope 1.
    """

    known: Conditions  # of the forward; with every key of the problem
    dout: torch.Tensor  # the loss's gradient with respect to out, ``(heads, rows, value_dim)``
    dlse: torch.Tensor  # with respect to LSE, ``(heads, rows)``; 0 in rows that see no key
    # Kept apart from dx: a kernel rounds delta before it is subtracted.
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
    """Errors of a score mod: of its score's error, and its own; ``(heads, rows, kv)``.

    Nothing of a sink, which it does not see: its error stays as it is.
    """

    # Largest |mod evaluated in fp32 on a score within its radius − exact mod|, on both sides of a
    # jump; infinite where nothing is known, as where a kernel may see a key that the mod hides or
    # the other way round. 0 where the mask hides the key.
    radius: torch.Tensor
    own: torch.Tensor  # the same on the exact score: the mod's own rounding
    jump: torch.Tensor  # bool: the score lies within its radius of a jump of the mod
    # bool: the mod's derivative is negative, so that an error of all scores of a row changes its
    # sign there; None where that does not matter.
    # None where nobody reads them: each costs another evaluation of the mod.
    falls: torch.Tensor | None = None
    # ``radius`` of errors that are no larger than is likely; None where that does not matter. Of
    # a mod that bends, ``radius`` over the whole error says nothing of a small one.
    likely: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadConditions:
    """One read of captured tensors in a score mod's text, ``(heads, rows, kv)``.

    Nothing of a sink, which reads none.
    """

    place: torch.Tensor  # which of all captured numbers, int64
    # The score mod's derivative with respect to that number, float64; 0 where not seen.
    slope: torch.Tensor
    error: ScoreModError  # what a kernel's may be off by


@dataclass(frozen=True, slots=True, eq=False)
class _KeptStep:
    """The result of a step of a bound, and what it was made from beside the Conditions."""

    function: Callable[..., Any]
    others: tuple[Any, ...]
    read: dict[str, Any]  # what it read of the arithmetic
    result: Any

    def answers(
        self, function: Callable[..., Any], arithmetic: Arithmetic, others: tuple[Any, ...]
    ) -> bool:
        """Return whether the function would make the same again."""
        return (
            self.function is function
            and all(map(_same, self.others, others))
            and all(getattr(arithmetic, name) == value for name, value in self.read.items())
        )


def _same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, float) and one == other)


class _Read:
    """An Arithmetic that notes what is read of it."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self.noted: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = self.noted[name] = getattr(self._arithmetic, name)
        return value


def kept_step(
    function: Callable[Concatenate[Conditions, Arithmetic, Others], Step],
) -> Callable[Concatenate[Conditions, Arithmetic, Others], Step]:
    """Make ``function`` keep with its Conditions what it returns, as long as those live.

    Kernels of one case differ in little of their arithmetic, and most steps of their bounds read
    nothing of that: one result is that of all arithmetics in which what was read is equal. Nobody
    may write to it. Further arguments are taken for the same only where they are the same object.
    """

    @functools.wraps(function)
    def kept(
        conditions: Conditions,
        arithmetic: Arithmetic,
        /,
        *others: Others.args,
        **named: Others.kwargs,
    ) -> Step:
        assert not named, "a kept step is called by position"
        for step in conditions.steps:
            if step.answers(function, arithmetic, others):
                return cast("Step", step.result)
        reading = _Read(arithmetic)
        result = function(conditions, cast("Arithmetic", reading), *others, **named)
        conditions.steps.append(_KeptStep(function, others, reading.noted, result))
        return result

    return cast("Callable[Concatenate[Conditions, Arithmetic, Others], Step]", kept)

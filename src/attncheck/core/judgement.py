"""The judge's verdict on one kernel and one Case, and other plain data that Records carry."""

from __future__ import annotations

import math
from html import escape
from typing import Literal, get_args

import msgspec

from attncheck.core.sanitize_text import one_line
from attncheck.core.tensor_names import AXES, TensorName

__all__ = ["Judgement"]

_MOST_DIGITS = 17  # that tell every two float64 apart

Status = Literal["pass", "warn", "inconclusive", "fail"]
"""``warn``: something is odd, and no proof of a fault. ``inconclusive``: the judge cannot tell."""

Rule = Literal[
    "",
    "contract",
    "alias",
    "mutation",
    "memory",
    "state",
    "leak",
    "finite",
    "empty rows",
    "structure",
    "bound",
    "improbable",
    "precision",
    "relation",
    "determinism",
    "regression",
]
"""Rule that a verdict other than ``pass`` rests on, in the order of the rules.

``finite``: NaN or infinite where the exact result is not. ``empty rows``: a row that sees no key is
not exactly 0 and −∞, or a gradient of it or of a key that no row sees not exactly 0. ``structure``:
an exact probe has another answer. ``bound``: beyond the deterministic bound, a proof.
``improbable``: beyond the probabilistic bound, p < 1e-6 on generic inputs. ``precision``: within
every bound, and less accurate than a kernel of this arithmetic is. ``relation``: two runs, or a run
and its own inputs, do not agree as they must; no other rule is applied with it.

Of the call, not of numbers: ``contract``: it gave something other than the call is for. ``alias``:
what it gave lies in the memory of its inputs. ``mutation``: it wrote to them. ``memory``: it wrote
beside its outputs, left some of them unwritten, or read what nobody gave it. ``state``: it left its
process changed. ``leak``: it keeps more with each call. ``determinism``: the same call gave other
bits than it promises. ``regression``: worse than the baseline.
"""
RULE_ORDER: tuple[Rule, ...] = get_args(Rule)


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An element of a tensor."""

    batch: int  # sequence; 0 of dsink and dcaptured, which are sums over all
    head: int  # query head; of dk and dv the key head, of dcaptured the number
    query: int  # row; of dk and dv the key, of dsink and dcaptured 0
    dim: int = -1  # −1 where the tensor has no last axis

    @classmethod
    def of(cls, index: tuple[int, ...]) -> Place:
        """Return the element at ``index``, in the axes that ``AXES`` has."""
        # dsink and dcaptured have one axis, whatever it counts: it takes the head's place.
        if len(index) == 1:
            return cls(batch=0, head=index[0], query=0)
        batch, head, query, *dim = index
        return cls(batch=batch, head=head, query=query, dim=dim[0] if dim else -1)

    def index(self, tensor: TensorName) -> tuple[int, ...]:
        """Return its index in ``tensor``."""
        axes = len(AXES[tensor])
        return (self.head,) if axes == 1 else (self.batch, self.head, self.query, self.dim)[:axes]


class Unclaimed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a problem has that nobody says the kernel takes, which is asked apart."""

    aspect: str  # the field of the capability table that it is of; ``lengths`` has none
    what: str  # the value: ``40``, ``query < kv``


class Worst(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The element that a verdict rests on, or else that of the largest error ÷ allowance."""

    tensor: TensorName
    at: Place
    # The tile it lies in by the kernel's declared tiling (``query tile 3, rows 192–255``); empty
    # where none is declared.
    tile: str = ""
    got: float
    exact: float
    # The deterministic bound of |got − exact|; of a relation those of both sides, or 0 where bits
    # are compared.
    allowance: float
    # What the allowance is made of, by the names of ``docs/explanation/bounds.md``; sums to it.
    # Empty of a relation.
    budget: dict[str, float]


class BlindSpot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The smallest faults that this problem would have exposed, by what the bounds allow."""

    # Share, 0–1, of the visible (row, key) pairs examined of which one dropped alone would have
    # been seen; None where no row sees two keys.
    # Not 0 where no row sees two keys: nothing can be dropped from one.
    dropped_keys: float | None
    # Smallest relative error of one key's weight that would have been seen, at the pair where it
    # is easiest; infinite where none.
    weight: float
    scale: float  # smallest relative error of the softmax scale; infinite where none
    # Accumulators that keep this many bits or fewer would have been seen; 0 where none would.
    accumulator_bits: int
    half: bool  # whether an output half as large would have been seen
    zeros: bool  # whether an output of zeros would have been seen
    mean_allowance: float  # mean allowance of out ÷ its root mean square


class Precision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accuracy of a kernel beside others of the same arithmetic."""

    # Largest over heads of rms(error ÷ predicted standard deviation); None where no head has
    # enough outputs.
    # None where a figure cannot be had: 0 would read as perfect.
    z: float | None = None
    # RMSE ÷ the largest of an ensemble of ideal kernels', in the head where that is largest; None
    # where it was not needed.
    spread: float | None = None
    # rms(out − emulation) ÷ rms(emulation − exact), the emulation being the ideal kernel at the
    # kernel's own declared tiling; None where none is declared.
    residual: float | None = None
    # Largest residual that is no news on generic inputs; left out where nothing is said of it.
    residual_allowed: float | msgspec.UnsetType = msgspec.UNSET
    bias: float = 0.0  # mean signed error ÷ RMSE
    # Least-squares slope of the error on the exact result: a factor missing from out.
    slope: float = 0.0
    # ulp_p50, ulp_p99: percentiles of the error in units in the last place of the output format,
    # over elements of at least out's root mean square.
    ulp_p50: float = 0.0
    ulp_p99: float = 0.0
    frobenius: float = 0.0  # ‖error‖ ÷ ‖exact‖
    # Cosine of out and the exact result, for comparison with other tools; never a rule.
    cosine: float = 1.0


class Judgement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The verdict on one kernel on one Case.

    Attributes:
        status: See ``Status``.
        rule: See ``Rule``; empty for a pass.
        reason: One line: what is wrong, or why it is not known; empty for a pass.
        warnings: What is odd besides, one line each.
        out_over_bound: Largest abs(error) ÷ deterministic bound over the elements of out.
        lse_over_bound: The same of LSE; None where the kernel does not expose it.
        out_over_probable: Largest abs(error) ÷ probabilistic bound over the sampled rows.
        lse_over_probable: The same of LSE.
        gradients_over_bound: The same as ``out_over_bound`` of each gradient, by its name; left out
            without a backward.
        worst: The element of the largest share; None where nothing was compared.
        wrong: Elements of the worst one's tensor that are beyond what is allowed.
        compared: Elements of it that were compared.
        rows: Rows that see a key.
        rows_sampled: Those on which the probabilistic bound, z and the blind spot were computed.
        rows_unbounded: Rows without a finite allowance, which are not judged: a score lies
            at a jump of its mod, or its error is too large for any bound.
        jumps: (row, key) pairs whose score lies within its own error of a jump of the score mod.
        precision: See ``Precision``.
        blind_spot: See ``BlindSpot``; None of a failure, and where nothing was compared.
        arithmetic: The profile that the bounds assume, in one line.
        lse_also_within: Another, tighter profile whose bound LSE satisfies too, in one line: of an
            fp8 kernel that does not declare its accumulator; empty otherwise.
    """

    status: Status
    rule: Rule = ""
    reason: str = ""
    warnings: tuple[str, ...] = ()
    out_over_bound: float | None = None
    # None, not 0: a share of 0 would say that LSE was compared and exact.
    lse_over_bound: float | None = None
    out_over_probable: float | None = None
    lse_over_probable: float | None = None
    # Unset is left out of the JSON: a forward has no gradients to speak of.
    gradients_over_bound: dict[TensorName, float] | msgspec.UnsetType = msgspec.UNSET
    worst: Worst | None = None
    wrong: int = 0
    compared: int = 0
    rows: int = 0
    rows_sampled: int = 0
    rows_unbounded: int = 0
    jumps: int = 0
    precision: Precision | None = None
    blind_spot: BlindSpot | None = None
    arithmetic: str = ""
    lse_also_within: str = ""

    def __str__(self) -> str:
        """``fail: bound: out[0, 3] = 0.41, but …``; of a pass the largest error ÷ bound."""
        shares = {"out": self.out_over_bound, "LSE": self.lse_over_bound}
        largest = (f"{name} {share_text(x)}" for name, x in shares.items() if x is not None)
        text = self.reason or " and ".join(f"{share} × the bound" for share in largest)
        return one_line(": ".join(filter(None, (self.status, self.rule, text))))

    def _repr_html_(self) -> str:
        return f"<code>{escape(str(self))}</code>"


def share_text(share: float, most: float = 1.0) -> str:
    """Return a share in two digits, or in as many as show on which side of ``most`` it is.

    ``0.31``, ``4.6``, ``159``, ``3.0e+36``; 1.0004 of at most 1 is not 1.0.
    """
    if share == 0 or not math.isfinite(share):
        return "0" if share == 0 else str(share)
    for digits in range(3 if 100 <= share < 1000 else 2, _MOST_DIGITS):
        text = f"{share:#.{digits}g}"
        if share == most or float(text) != most:
            return text.rstrip(".")
    return repr(share)

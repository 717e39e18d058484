"""The judge's verdict on one kernel and one Case, and related data in Records."""

from __future__ import annotations

import math
from html import escape
from typing import Literal, get_args

import msgspec

from attncheck.core.sanitize_text import one_line
from attncheck.core.tensor_names import AXES, TensorName

__all__ = ["Judgement"]

_MOST_DIGITS = 17  # Significant digits that distinguish any two float64.

Status = Literal["pass", "warn", "inconclusive", "fail"]
"""``warn``: suspicious, but no proof of a fault. ``inconclusive``: the judge cannot decide."""

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
"""Rule that justifies a verdict other than ``pass``, in the order in which rules take precedence.

``finite``: NaN or infinite where the exact result is not. ``empty rows``: out or LSE of a row that
sees no key is not exactly 0 or −∞, or a gradient of such a row, or of a key that no row sees, is
not exactly 0. ``structure``: the answer to an exact probe is wrong. ``bound``: the deterministic
bound is exceeded, which proves a fault. ``improbable``: the probabilistic bound is exceeded, p <
1e-6 on generic inputs. ``precision``: within all bounds, but less accurate than kernels of this
arithmetic are. ``relation``: two runs, or a run and its inputs, violate a relation; then no other
rule is applied.

Rules about the call instead of numbers: ``contract``: wrong type or form of the outputs. ``alias``:
an output shares memory with an input. ``mutation``: the call wrote to its inputs. ``memory``: it
wrote outside of its outputs, left parts of them unwritten, or read memory that is not an input.
``state``: it changed the state of the process. ``leak``: memory grows with each call.
``determinism``: repeated calls gave different bits, unlike promised. ``regression``: worse than the
baseline.
"""
RULE_ORDER: tuple[Rule, ...] = get_args(Rule)


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of an element in a tensor."""

    batch: int  # sequence; 0 in dsink and dcaptured, which are sums over all sequences
    head: int  # query head; the key head in dk and dv, the number in dcaptured
    query: int  # row; the key in dk and dv, 0 in dsink and dcaptured
    dim: int = -1  # index in the head or value dimension; −1 in tensors without this axis

    @classmethod
    def of(cls, index: tuple[int, ...]) -> Place:
        """Return the Place at ``index``, whose axes are those of ``AXES``."""
        # dsink and dcaptured have a single axis, which is stored as the head.
        if len(index) == 1:
            return cls(batch=0, head=index[0], query=0)
        batch, head, query, *dim = index
        return cls(batch=batch, head=head, query=query, dim=dim[0] if dim else -1)

    def index(self, tensor: TensorName) -> tuple[int, ...]:
        """Return the index of the element in ``tensor``."""
        axes = len(AXES[tensor])
        return (self.head,) if axes == 1 else (self.batch, self.head, self.query, self.dim)[:axes]


class Unclaimed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A feature of a problem that exceeds the kernel's claims, and is tested separately."""

    aspect: str  # field of the capability table, or one that is none, such as ``lengths``
    what: str  # the value: ``40``, ``query < kv``


class Worst(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The element that justifies a verdict, or else the one with the largest error ÷ allowance."""

    tensor: TensorName
    at: Place
    # Tile of the element in the kernel's declared tiling (``query tile 3, rows 192–255``); empty
    # without a declaration.
    tile: str = ""
    got: float
    exact: float
    # Deterministic bound of |got − exact|; for a relation the bounds of both sides, or 0 where bits
    # are compared.
    allowance: float
    # Terms that sum to the allowance, by their names in ``docs/explanation/bounds.md``; empty for a
    # relation.
    budget: dict[str, float]


class BlindSpot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The smallest faults that would have exceeded the bounds on this problem."""

    # Share, 0–1, of the examined visible (row, key) pairs for which dropping the key alone would be
    # detected; None, not 0, where no row sees two keys, so that none can be dropped.
    dropped_keys: float | None
    # Smallest detectable relative error of one key's weight, at the most sensitive pair; infinite
    # where none is detectable.
    weight: float
    scale: float  # smallest detectable relative error of the softmax scale; infinite where none
    # Accumulators that keep this many bits or fewer would be detected; 0 where none would.
    accumulator_bits: int
    half: bool  # whether an output half as large would be detected
    zeros: bool  # whether an output of zeros would be detected
    mean_allowance: float  # mean allowance of out ÷ its root mean square


class Precision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accuracy of a kernel compared with ideal kernels of the same arithmetic."""

    # Largest over heads of rms(error ÷ predicted standard deviation); None, since 0 would mean
    # perfect, where no head has enough outputs.
    z: float | None = None
    # RMSE ÷ the largest RMSE in an ensemble of ideal kernels, in the head where it is largest; None
    # where it was not needed.
    spread: float | None = None
    # rms(out − emulation) ÷ rms(emulation − exact), where the emulation is the ideal kernel at the
    # kernel's declared tiling; None without a declaration.
    residual: float | None = None
    # Largest residual that is expected on generic inputs; left out where it was not determined.
    residual_allowed: float | msgspec.UnsetType = msgspec.UNSET
    bias: float = 0.0  # mean signed error ÷ RMSE
    # Least-squares slope of the error over the exact result: relative error of a factor of out.
    slope: float = 0.0
    # ulp_p50, ulp_p99: percentiles of the error in units in the last place of the output format,
    # over elements of at least out's root mean square.
    ulp_p50: float = 0.0
    ulp_p99: float = 0.0
    frobenius: float = 0.0  # ‖error‖ ÷ ‖exact‖
    # Cosine of out and the exact result, for comparison with other tools; no rule uses it.
    cosine: float = 1.0


class Judgement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The verdict on one kernel on one Case.

    Attributes:
        status: See ``Status``.
        rule: See ``Rule``; empty for a pass.
        reason: What is wrong, or why this is unknown, in one line; empty for a pass.
        warnings: Further suspicious observations, one line each.
        out_over_bound: Largest abs(error) ÷ deterministic bound over the elements of out.
        lse_over_bound: ``out_over_bound`` for LSE; None where the kernel does not expose it.
        out_over_probable: Largest abs(error) ÷ probabilistic bound over the sampled rows.
        lse_over_probable: ``out_over_probable`` for LSE.
        gradients_over_bound: ``out_over_bound`` for each gradient, by its name; left out without a
            backward.
        worst: See ``Worst``; None where nothing was compared.
        wrong: Number of elements of the worst element's tensor that exceed their allowance.
        compared: Number of elements of that tensor that were compared.
        rows: Number of rows that see a key.
        rows_sampled: Number of rows for which the probabilistic bound, z and the blind spot were
            computed.
        rows_unbounded: Number of rows without a finite allowance, which are not judged: a score
            lies at a jump of its mod, or its error is too large for any bound.
        jumps: (row, key) pairs whose score lies within its own error of a jump of the score mod.
        precision: See ``Precision``.
        blind_spot: See ``BlindSpot``; None for a failure, and where nothing was compared.
        arithmetic: The arithmetic that the bounds assume, in one line.
        lse_also_within: A more accurate arithmetic whose bound LSE satisfies too, in one line, for
            an fp8 kernel that does not declare its accumulator; empty otherwise.
    """

    status: Status
    rule: Rule = ""
    reason: str = ""
    warnings: tuple[str, ...] = ()
    out_over_bound: float | None = None
    # None instead of 0, which would mean that LSE was compared and exact.
    lse_over_bound: float | None = None
    out_over_probable: float | None = None
    lse_over_probable: float | None = None
    # Unset fields are left out of the JSON, as for the gradients of a forward.
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
        """Return ``fail: bound: out[0, 3] = 0.41, but …``; for a pass the largest error ÷ bound."""
        shares = {"out": self.out_over_bound, "LSE": self.lse_over_bound}
        largest = (f"{name} {share_text(x)}" for name, x in shares.items() if x is not None)
        text = self.reason or " and ".join(f"{share} × the bound" for share in largest)
        return one_line(": ".join(filter(None, (self.status, self.rule, text))))

    def _repr_html_(self) -> str:
        return f"<code>{escape(str(self))}</code>"


def share_text(share: float, most: float = 1.0) -> str:
    """Return a share in two digits, or in more if needed to show on which side of ``most`` it is.

    ``0.31``, ``4.6``, ``159``, ``3.0e+36``; with ``most`` 1, 1.0004 is not shortened to 1.0.
    """
    if share == 0 or not math.isfinite(share):
        return "0" if share == 0 else str(share)
    for digits in range(3 if 100 <= share < 1000 else 2, _MOST_DIGITS):
        text = f"{share:#.{digits}g}"
        if share == most or float(text) != most:
            return text.rstrip(".")
    return repr(share)

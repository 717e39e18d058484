"""The mask and the score mod that a kernel really applies, read out of its own results.

A mask: with q = 0 all visible keys weigh the same, and with V the identity, column j of out is the
weight of key j. A score mod: a row that sees one key only has that key's score as its LSE; q and k
hold small whole numbers over a power of two, so that every q·k is exact in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from attncheck.core.draws import Draws
from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import NONE, Dimensions, Entry, Spec
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.masks import MASKS
from attncheck.mods.operation_errors import KERNEL_FP32
from attncheck.mods.scores import SCORES
from attncheck.mods.signatures import MaskMod, ScoreMod
from attncheck.subjects.capabilities.subject import Subject
from attncheck.verify.executor import Executor, Failure

_HEAD_DIM = 16  # what compiled flex_attention needs at least
_COLUMNS = 64  # of V at a time
_LARGEST = 4  # of the whole numbers in q and k
_DENOMINATOR = 4.0  # of them

_U = FORMATS["fp32"].unit_roundoff
# Both are derived at ``lse_radius``.
_LSE_RELATIVE = 7 * _U
_LSE_ABSOLUTE = (2 * 2 * KERNEL_FP32.ulps["exp2"] + 4) * _U


class NotMeasurable(Exception):
    """A kernel's mod cannot be read; why."""

    def __init__(self, status: Literal["unsupported", "error"], reason: str) -> None:
        super().__init__(reason)
        self.status: Literal["unsupported", "error"] = status  # ``unsupported`` or ``error``


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInputs:
    """q, k and their products, float64 numbers that fp32 holds."""

    q: torch.Tensor  # ``(batch, heads, query, 16)``
    k: torch.Tensor  # ``(batch, heads, kv, 16)``
    scores: torch.Tensor  # ``(batch, heads, query, kv)``, multiples of 1/16 up to ±16

    @classmethod
    def draw(cls, dimensions: Dimensions) -> ScoreInputs:
        """Draw them, the same on every machine."""
        draws = Draws(0)
        q, k = (
            (draws.integers(f"mod_probes/{name}", shape, 2 * _LARGEST + 1) - _LARGEST)
            / _DENOMINATOR
            for name, shape in (
                ("q", (dimensions.batch, dimensions.heads, dimensions.query, _HEAD_DIM)),
                ("k", (dimensions.batch, dimensions.heads, dimensions.kv, _HEAD_DIM)),
            )
        )
        # Exact in any order of sums: sixteen products of small multiples of 1/16.
        scores = torch.from_numpy(q) @ torch.from_numpy(k).mT
        return cls(torch.from_numpy(q), torch.from_numpy(k), scores)


def applied_mask(
    subject: Subject,
    name: str,
    mask: MaskMod,
    dimensions: Dimensions,
    device: str,
    executor: Executor,
    spec: Spec | None = None,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The weights that ``subject`` gives to equal scores, ``(batch, heads, query, kv)``.

    Positive where its row sees a key and 0 where it does not. The ``name`` is what the Problem
    calls the mask: a subject that compiles keeps Problems of other names apart. Its ``spec``, where
    the library has it: a kernel of another process knows no other.

    Raises:
        NotMeasurable: where the kernel does not take the problem, or fails.
    """
    own = _registered(MASKS, f"examined {name}", mask)
    with own if spec is None else nullcontext(spec) as named:
        problem = _problem(dimensions, value_dim=_COLUMNS, mask=named)
        rows = (dimensions.batch, dimensions.heads)
        q = torch.zeros(*rows, dimensions.query, _HEAD_DIM)
        k = torch.zeros(*rows, dimensions.kv, _HEAD_DIM)
        parts = []
        # An identity as wide as kv would be a value_dim that no kernel takes.
        for first in range(0, dimensions.kv, _COLUMNS):
            v = torch.eye(dimensions.kv, first + _COLUMNS)[:, first:].expand(*rows, -1, -1)
            inputs = Inputs(problem=problem, q=q, k=k, v=v.contiguous()).to(device)
            parts.append(_run(subject, inputs, device, executor).out)
    return torch.cat(parts, dim=-1)[..., : dimensions.kv].cpu().double().numpy()


def applied_score(
    subject: Subject,
    name: str,
    score: ScoreMod,
    scores: ScoreInputs,
    dimensions: Dimensions,
    device: str,
    executor: Executor,
    spec: Spec | None = None,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Scores that ``subject`` makes of ``scores``, ``(batch, heads, query, kv)``.

    They are read through its LSE, in one call a key: in call r row i sees key (i + r) mod kv. Which
    one a captured tensor says, so that nothing is compiled again.

    Raises:
        NotMeasurable: as ``applied_mask``; also for a kernel that gives no LSE.
    """
    key_of = torch.zeros(dimensions.query, dtype=torch.int64, device=device)

    def one_key(_b: Any, _h: Any, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return key_of[q_idx] == kv_idx

    applied = torch.empty(scores.scores.shape, dtype=torch.float64)
    row = torch.arange(dimensions.query)
    own = _registered(SCORES, f"examined {name}", score)
    with (
        _registered(MASKS, "one key a row", one_key) as mask,
        own if spec is None else nullcontext(spec) as named,
    ):
        problem = _problem(dimensions, value_dim=_HEAD_DIM, mask=mask, score=named)
        q, k = scores.q.float(), scores.k.float()
        inputs = Inputs(problem=problem, q=q, k=k, v=torch.zeros_like(k)).to(device)
        for r in range(dimensions.kv):
            keys = (row + r) % dimensions.kv
            # In place: the mask captures this very tensor.
            key_of.copy_(keys)
            if spec is not None:  # which sees no tensor of this process
                text = f"(q_idx + {r}) % {dimensions.kv} == kv_idx"
                problem = problem.replace(mask=Spec.of("expression", text=text))
                inputs = inputs.replace(problem=problem)
            lse = _run(subject, inputs, device, executor).lse
            if lse is None:
                raise NotMeasurable(
                    "unsupported", "it gives no LSE, from which a score could be read"
                )
            applied[:, :, row, keys] = lse.cpu().double()
    return applied.numpy()


def lse_radius(scores: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """How far the LSE of a row that sees one key may be off, its score being off by ``radius``.

    An LSE through base 2 is (m + log2 l)·ln 2 with m = fp32(s·log2 e), l = exp2(s·log2 e − m), and
    u = 2^-24. Relative to s there are 6 roundings of at most u each: both constants, both products,
    the sum, and s·log2 e − m where it is fused, which leaves the first product's rounding in l. So
    7u with what is of second order. l is otherwise 1 but for exp2's error of so many ulps, 2u each,
    and as much again where parts of the keys are put together; log2 near 1 is at most 2^-22 = 4u
    off. These do not shrink with s. An LSE through e^x has fewer of each.
    """
    added = _LSE_RELATIVE * (scores.abs() + radius) + _LSE_ABSOLUTE
    return radius + torch.where(scores.isinf(), 0.0, added)


def _problem(dimensions: Dimensions, *, value_dim: int, mask: Spec, score: Spec = NONE) -> Problem:
    return Problem(
        batch=dimensions.batch,
        heads=dimensions.heads,
        query=dimensions.query,
        kv=dimensions.kv,
        head_dim=_HEAD_DIM,
        value_dim=value_dim,
        dtype="fp32",
        scale=1.0,
        mask=mask,
        score=score,
    )


def _run(subject: Subject, inputs: Inputs, device: str, executor: Executor) -> Any:
    # A softmax, say, which has neither mask nor score mod.
    if not executor.concerns(subject, inputs.problem):
        raise NotMeasurable("unsupported", "attention in fp32 is no question for it")
    refusal = executor.refusal(subject, inputs.problem, device)
    if isinstance(refusal, str):
        raise NotMeasurable("unsupported", refusal)
    result = refusal or executor.run(subject, inputs)
    if isinstance(result, Failure):
        raise NotMeasurable("error", result.message)
    return result.outputs


@contextmanager
def _registered(
    entries: dict[str, Entry[Any]], name: str, mod: Callable[..., Any]
) -> Iterator[Spec]:
    """``mod`` in the library for as long as this lasts, for a Problem to hold."""
    entries[name] = Entry(summary=name, build=lambda *_: mod, additive=False)
    try:
        yield Spec.of(name)
    finally:
        # A later mod of this name would be taken for this one.
        del entries[name]

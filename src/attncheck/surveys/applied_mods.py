"""Derive the mask and the score mod that a kernel really applies from its own results.

Mask: with q = 0 all visible keys weigh the same, and with V the identity, column j of out is the
weight of key j. Score mod: a row that sees only one key has that key's score as its LSE; q and k
hold small integers divided by a power of two, so that every q·k is exact in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
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

_HEAD_DIM = 16  # The smallest that compiled flex_attention takes.
_COLUMNS_PER_CALL = 64  # Columns of V per call.
_LARGEST = 4  # q and k hold n / _DENOMINATOR for integers n up to ±_LARGEST.
_DENOMINATOR = 4.0

_U = FORMATS["fp32"].unit_roundoff
# Both are derived in ``lse_radius``.
_LSE_RELATIVE = 7 * _U
_LSE_ABSOLUTE = (2 * 2 * KERNEL_FP32.ulps["exp2"] + 4) * _U


class NotMeasurable(Exception):
    """A kernel's mod cannot be read, for the given reason."""

    def __init__(self, status: Literal["unsupported", "error"], reason: str) -> None:
        super().__init__(reason)
        self.status: Literal["unsupported", "error"] = status


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInputs:
    """q, k and their products, in float64 but exact in fp32."""

    q: torch.Tensor  # ``(batch, heads, query, 16)``
    k: torch.Tensor  # ``(batch, heads, kv, 16)``
    scores: torch.Tensor  # ``(batch, heads, query, kv)``, multiples of 1/16 up to ±16

    @classmethod
    def draw(cls, dimensions: Dimensions) -> ScoreInputs:
        """Draw inputs that are the same on every machine."""
        draws = Draws(0)
        q, k = (
            (draws.integers(f"mod_probes/{name}", shape, 2 * _LARGEST + 1) - _LARGEST)
            / _DENOMINATOR
            for name, shape in (
                ("q", (dimensions.batch, dimensions.heads, dimensions.query, _HEAD_DIM)),
                ("k", (dimensions.batch, dimensions.heads, dimensions.kv, _HEAD_DIM)),
            )
        )
        # Exact in any order of summation: sixteen products that are small multiples of 1/16.
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
    """Return the weights that ``subject`` gives to equal scores, ``(batch, heads, query, kv)``.

    A weight is positive if the row sees the key, else 0. The ``name`` becomes part of the mask's
    name in the Problem, by which subjects cache compiled kernels. A kernel in another process needs
    the mask as a ``spec`` of the library.

    Raises:
        NotMeasurable: if the kernel does not take the problem, or fails.
    """
    registered = _register_mod(MASKS, f"examined {name}", mask)
    with registered if spec is None else nullcontext(spec) as mask_spec:
        problem = _problem(dimensions, value_dim=_COLUMNS_PER_CALL, mask=mask_spec)
        rows = (dimensions.batch, dimensions.heads)
        q = torch.zeros(*rows, dimensions.query, _HEAD_DIM)
        k = torch.zeros(*rows, dimensions.kv, _HEAD_DIM)
        parts = []
        # In parts, because kernels do not take a value_dim as large as kv.
        for first in range(0, dimensions.kv, _COLUMNS_PER_CALL):
            v = torch.eye(dimensions.kv, first + _COLUMNS_PER_CALL)[:, first:].expand(*rows, -1, -1)
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
    """Return the scores that ``subject`` makes of ``scores``, ``(batch, heads, query, kv)``.

    They are read from LSE in one call per key: in call r row i sees key (i + r) mod kv. The mask
    reads the key from a captured tensor, so that nothing is compiled again.

    Raises:
        NotMeasurable: as in ``applied_mask``; also if the kernel gives no LSE.
    """
    key_of = torch.zeros(dimensions.query, dtype=torch.int64, device=device)

    def one_key(_b: Any, _h: Any, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return key_of[q_idx] == kv_idx

    applied = torch.empty(scores.scores.shape, dtype=torch.float64)
    row = torch.arange(dimensions.query)
    registered = _register_mod(SCORES, f"examined {name}", score)
    with (
        _register_mod(MASKS, "one key a row", one_key) as mask,
        registered if spec is None else nullcontext(spec) as score_spec,
    ):
        problem = _problem(dimensions, value_dim=_HEAD_DIM, mask=mask, score=score_spec)
        q, k = scores.q.float(), scores.k.float()
        inputs = Inputs(problem=problem, q=q, k=k, v=torch.zeros_like(k)).to(device)
        for r in range(dimensions.kv):
            keys = (row + r) % dimensions.kv
            # In place, because the mask captures this tensor.
            key_of.copy_(keys)
            if spec is not None:  # another process does not see the captured tensor
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
    """Return the error bound for the LSE of a row with one key whose score is off by ``radius``.

    In base 2, LSE is (m + log2 l)·ln 2 with m = fp32(s·log2 e), l = exp2(s·log2 e − m), and
    u = 2^-24. Relative to s there are 6 roundings of at most u each: both constants, both products,
    the sum, and s·log2 e − m if it is fused, which leaves the first product's rounding in l. With
    second-order terms that is 7u. Otherwise l is 1 up to exp2's error of some ulps, 2u each, and as
    much again if parts of the keys are merged; log2 near 1 is off by at most 2^-22 = 4u. These
    errors do not shrink with s. An LSE in base e has fewer of each kind.
    """
    lse_error = _LSE_RELATIVE * (scores.abs() + radius) + _LSE_ABSOLUTE
    return radius + torch.where(scores.isinf(), 0.0, lse_error)


def _problem(dimensions: Dimensions, *, value_dim: int, mask: Spec, score: Spec = NONE) -> Problem:
    return Problem(
        **asdict(dimensions),
        head_dim=_HEAD_DIM,
        value_dim=value_dim,
        dtype="fp32",
        scale=1.0,
        mask=mask,
        score=score,
    )


def _run(subject: Subject, inputs: Inputs, device: str, executor: Executor) -> Any:
    # A softmax kernel, for example, has neither mask nor score mod.
    if not executor.concerns(subject, inputs.problem):
        raise NotMeasurable("unsupported", "attention in fp32 is no question for it")
    refusal = executor.refusal(subject, inputs.problem, device)
    if refusal is not None and refusal.kind == "refused":
        raise NotMeasurable("unsupported", refusal.message)
    result = refusal or executor.run(subject, inputs)
    if isinstance(result, Failure):
        raise NotMeasurable("error", result.message)
    return result.outputs


@contextmanager
def _register_mod(
    entries: dict[str, Entry[Any]], name: str, mod: Callable[..., Any]
) -> Iterator[Spec]:
    """Add ``mod`` to the library temporarily, so that a Problem can name it."""
    entries[name] = Entry(summary=name, build=lambda *_: mod, additive=False)
    try:
        yield Spec.of(name)
    finally:
        # Otherwise a later mod of this name would be mistaken for this one.
        del entries[name]

"""Expressions evaluated on intervals that hold every right floating-point evaluation.

Every operation is exact interval arithmetic, and then wider by what the arithmetic declares of that
operation. Fewer roundings (a fused multiplication and addition) lie inside, and so do subnormal
numbers flushed to 0. A comparison that could go either way gives both truth values, ``where`` the
union of its branches, and what is cut to a whole number every one it may be cut to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from attncheck.core.formats import FORMATS, Format
from attncheck.mods import enclosures
from attncheck.mods.enclosures import (
    LOGIC,
    Enclosure,
    Interval,
    Truth,
    Values,
    Whole,
    apply_to_whole,
    captured_array,
    cast_whole,
    choose,
    compare_whole,
    elementwise,
    elementwise_pair,
    possible_numbers,
    union,
)
from attncheck.mods.expression import node_dtypes
from attncheck.mods.operation_errors import TRITON_ULP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from attncheck.mods.expression import Expression, Node

__all__ = ["KERNEL_FP32", "TORCH_FP64", "Arithmetic", "to_interval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What an implementation may make of an operation.

    Attributes:
        format: Of the score that comes in; what torch computes in a narrower one may be computed
            there, nothing is computed in a wider one.
        ulps: Largest error of each operation on exact operands, in units in the last place; what
            is not there is exact.
        argument_ulps: How far its operand may be rounded before, likewise.
    """

    format: Format
    ulps: Mapping[str, float]
    argument_ulps: Mapping[str, float] = field(default_factory=dict)


_IEEE = dict.fromkeys(("add", "sub", "mul", "div", "sqrt", "cast"), 0.5)

TORCH_FP64 = Arithmetic(
    format=FORMATS["fp64"],
    ulps={
        **_IEEE,
        # The vector functions of SLEEF (u10) and MKL (HA), which torch calls, state 1 ulp.
        **dict.fromkeys(("tanh", "exp", "exp2", "log", "log2", "sin", "cos"), 1.0),
        "rsqrt": 1.5,  # a root and a division, half an ulp or one u each, and their product
        "sigmoid": 2.5,  # e^−x 2u, its sum with 1 and the division u each, and their products
        "remainder": 0.5,  # fmod is exact; the divisor added once
        "floor_divide": 2.5,  # as in TRITON_ULP: torch's own rule
    },
)
"""torch on a CPU with float64 scores; what it computes in float32 is rounded to that."""

_TORCH_ON_A_GPU = {"sqrt": 1.0, "rsqrt": 2.0}

KERNEL_FP32 = Arithmetic(
    format=FORMATS["fp32"],
    # Where our kernels are better than what torch calls on a GPU (sqrt.approx, CUDA's rsqrtf),
    # torch counts.
    ulps=TRITON_ULP | {op: max(TRITON_ULP[op], n) for op, n in _TORCH_ON_A_GPU.items()},
    # Its e^x is 2^(x·log2 e): a rounded product with a rounded constant.
    argument_ulps={"exp": 1.0, "sigmoid": 1.0},
)
"""A kernel that computes scores in fp32: ours in Triton, or torch's flex_attention."""


def to_interval(expression: Expression, arithmetic: Arithmetic) -> Callable[..., Truth | Interval]:
    """The expression as a function of numpy arrays that gives Truth (masks) or Interval.

    The function takes ``(scores, b, h, q_idx, kv_idx)``, a mask's no scores: float64 numbers that
    ``arithmetic.format`` holds, and whole numbers, of shapes that broadcast.

    Raises (the function):
        ProblemError: for a whole number that is known too badly to go on with.
    """
    evaluation = _Evaluation(expression, arithmetic)
    return evaluation.run


class _Evaluation:
    def __init__(self, expression: Expression, arithmetic: Arithmetic) -> None:
        self._nodes = expression.structure.nodes
        self._inputs = expression.structure.inputs
        self._captured = expression.captured
        self._widest = arithmetic.format
        self._ulps, self._argument_ulps = arithmetic.ulps, arithmetic.argument_ulps
        found = node_dtypes(expression, arithmetic.format.torch_dtype)
        self._formats = [self._format(dtype) for dtype in found]

    def run(self, *inputs: Values) -> Truth | Interval:
        named = dict(zip(self._inputs, map(np.asarray, inputs), strict=True))
        values: list[Enclosure] = []
        for i, node in enumerate(self._nodes):
            operands = [values[o] for o in node.operands]
            values.append(self._value(i, node, operands) if operands else self._leaf(i, named))
        result = values[-1]
        assert not isinstance(result, Whole)
        return result

    def _format(self, dtype: torch.dtype | None) -> Format | None:
        """What values of ``dtype`` are computed in; None for whole and for Python numbers."""
        if dtype is None or not dtype.is_floating_point:
            return None
        own = next(f for f in FORMATS.values() if f.torch_dtype == dtype)
        return own if own.significand < self._widest.significand else self._widest

    def _leaf(self, i: int, named: dict[str, Values]) -> Enclosure:
        node = self._nodes[i]
        if node.op == "input":
            return self._given(i, named[node.name])
        if node.op in {"true", "false"}:
            return self._given(i, np.asarray(node.op == "true"))
        value = captured_array(self._captured[node.slot])
        # A table may hold anything; what an index reads of it is known.
        return Whole(value, value) if node.op == "tensor" else self._given(i, value)

    def _given(self, i: int, values: Values) -> Enclosure:
        """Values that are known exactly; real ones as a kernel holds them, subnormal ones or 0."""
        kind, fmt = self._nodes[i].kind, self._formats[i]
        if kind == "bool":
            return Truth(values.astype(bool), ~values.astype(bool))
        if kind == "int":
            return Whole(values, values)
        real = Interval.of(values)
        return real if fmt is None else real.through(enclosures.Rounding(fmt, 0.5))

    def _value(self, i: int, node: Node, operands: list[Enclosure]) -> Enclosure:
        special = {"index": self._read, "where": self._where, "cast": self._cast}
        if node.op in special:
            return special[node.op](i, node, operands)
        if node.op in enclosures.INTERVAL_COMPARISONS:
            return self._compare(node, operands)
        if node.kind == "float":
            return self._real(i, node, operands)
        if node.kind == "bool" and node.op in LOGIC:
            return LOGIC[node.op](*operands)
        found = apply_to_whole(node.op, [operand.whole() for operand in operands])
        return found if node.kind == "int" else found.truth()

    def _real(self, i: int, node: Node, operands: list[Enclosure]) -> Interval:
        arrays = self._in_format(self._formats[i] or self._widest, node.operands, operands)
        if node.op in self._argument_ulps:
            before = enclosures.Rounding(self._widest, self._argument_ulps[node.op])
            arrays = [elementwise(before, object, array) for array in arrays]
        exactly, ulps = enclosures.INTERVAL_OPERATIONS[node.op], self._ulps.get(node.op, 0.0)
        if not ulps:
            return Interval(elementwise(exactly, object, *arrays))
        rounding = enclosures.Rounding(self._formats[i] or self._widest, ulps)
        return Interval(elementwise(lambda *pairs: rounding(exactly(*pairs)), object, *arrays))

    def _in_format(
        self, fmt: Format, positions: tuple[int, ...], operands: list[Enclosure]
    ) -> list[Values]:
        """Operands as real numbers of the format in which an operation is computed."""
        arrays = []
        for position, operand in zip(positions, operands, strict=True):
            own, real = self._formats[position], operand.real()
            if own is None or own.significand > fmt.significand:
                real = real.through(enclosures.Rounding(fmt, 0.5))
            arrays.append(real.pairs)
        return arrays

    def _compare(self, node: Node, operands: list[Enclosure]) -> Truth:
        if not any(isinstance(operand, Interval) for operand in operands):
            return compare_whole(node.op, *(operand.whole() for operand in operands))
        formats = [f for o in node.operands if (f := self._formats[o]) is not None]
        # A whole number and a Python number are compared in torch's default dtype.
        fmt = max(formats, key=lambda f: f.significand, default=FORMATS["fp32"])
        arrays = self._in_format(fmt, node.operands, operands)
        return Truth(*elementwise_pair(enclosures.INTERVAL_COMPARISONS[node.op], bool, *arrays))

    def _where(self, i: int, node: Node, operands: list[Enclosure]) -> Enclosure:
        condition, *branches = operands
        assert isinstance(condition, Truth)
        if node.kind == "float":
            fmt = self._formats[i] or self._widest
            branches = [Interval(a) for a in self._in_format(fmt, node.operands[1:], branches)]
        elif node.kind == "int":
            branches = [branch.whole() for branch in branches]
        return choose(condition, *branches)

    def _cast(self, i: int, node: Node, operands: list[Enclosure]) -> Enclosure:
        (operand,) = operands
        if node.kind == "float":
            fmt = self._formats[i] or self._widest
            return Interval(*self._in_format(fmt, node.operands, [operand]))
        if node.kind == "bool":
            return operand.truth()
        if isinstance(operand, Interval):
            return Whole(*elementwise_pair(enclosures.pair_toward_zero, np.int64, operand.pairs))
        whole = operand.whole()
        if not whole.known:
            return whole
        wrapped = cast_whole(whole.low, node.name)
        return Whole(wrapped, wrapped)

    def _read(self, i: int, _node: Node, operands: list[Enclosure]) -> Enclosure:
        table, *places = (operand.whole() for operand in operands)
        found = []
        for indices in possible_numbers(places):
            inside = (
                np.clip(index, -size, size - 1)
                for index, size in zip(indices, table.low.shape, strict=True)
            )
            found.append(self._given(i, np.asarray(table.low[tuple(inside)])))
        return union(found)

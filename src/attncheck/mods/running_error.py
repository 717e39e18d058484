"""What a score mod makes of an error of its score, and what its own arithmetic adds.

Every value of the traced expression is computed as the oracle computes it, with the largest
distance that a kernel's may have from it (running error analysis: Higham, "Accuracy and Stability
of Numerical Algorithms", 2002, section 3.3). ``to_interval`` encloses an evaluation from outside,
number by number; this is for millions of scores, and knows the errors that come in.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from attncheck.conditions import ScoreModError
from attncheck.mods.expression import LEAVES, OPERATIONS
from attncheck.mods.radii import JUMPS, RADII, Around, chosen, compared, logical
from attncheck.mods.roundings import SLACK, Roundings
from attncheck.mods.to_interval import KERNEL_FP32
from attncheck.mods.whole_reads import read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attncheck.mods.expression import Expression, Node
    from attncheck.mods.to_interval import Arithmetic

__all__ = ["RunningError"]


class RunningError:
    """The analysis of one traced score mod.

    Args:
        expression: The score mod, its captured tensors on the device of the scores.
        tanh_error: Largest relative error of a kernel's tanh, where it is larger than that of
            ``arithmetic``.
        arithmetic: How an implementation computes the mod; ``TORCH_FP64`` for the oracle itself.
    """

    def __init__(
        self,
        expression: Expression,
        tanh_error: float = 0.0,
        *,
        arithmetic: Arithmetic = KERNEL_FP32,
    ) -> None:
        self._expression = expression
        self._roundings = Roundings(expression, arithmetic, tanh_error)
        nodes = expression.structure.nodes
        self._last_use = {o: i for i, node in enumerate(nodes) for o in node.operands}

    def at(
        self, products: Tensor, radius: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> ScoreModError:
        """The errors at some scores, each ``(heads, rows, kv)``.

        Args:
            products: The exact scores that come in, float64 ``(heads, rows, kv)``.
            radius: How far a kernel's may be off, of that shape.
            b: Sequence of each; index tensors broadcast to that shape.
            h: Head.
            q_idx: Query row.
            kv_idx: Key.
        """
        given = (products, b, h, q_idx, kv_idx)
        total = _Evaluation(self._expression, self._roundings, self._last_use, given).run(
            radius * SLACK
        )
        own = _Evaluation(self._expression, self._roundings, self._last_use, given).run(
            torch.zeros((), dtype=torch.float64, device=products.device)
        )
        return ScoreModError(
            radius=total.radius.expand(products.shape).contiguous(),
            own=own.radius.expand(products.shape).contiguous(),
            jump=total.jump.expand(products.shape).contiguous(),
        )


class _Evaluation:
    """One walk over the nodes; of each its value as torch has it, and where a kernel's lies."""

    def __init__(
        self,
        expression: Expression,
        roundings: Roundings,
        last_use: dict[int, int],
        given: Sequence[Tensor],
    ) -> None:
        self._nodes = expression.structure.nodes
        self._captured = expression.captured
        self._given = dict(zip(expression.structure.inputs, given, strict=True))
        self._roundings, self._last_use = roundings, last_use
        self._device = given[0].device
        self._never = torch.zeros((), dtype=torch.bool, device=self._device)
        self._zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self._raw: dict[int, Any] = {}
        self._known: dict[int, Around] = {}

    def run(self, radius: Tensor) -> Around:
        """The last node, of a score with ``radius``."""
        for i, node in enumerate(self._nodes):
            if node.op in LEAVES:
                self._raw[i] = self._leaf(node)
                score = node.op == "input" and node.name == "score"
                value = self._tensor(self._raw[i])  # captured numbers are fp32 numbers: see trace
                self._known[i] = Around(value, radius if score else self._zero, self._never)
            else:
                self._raw[i] = OPERATIONS[node.op](node, *(self._raw[o] for o in node.operands))
                self._known[i] = self._value(i, node, [self._known[o] for o in node.operands])
            for o in set(node.operands):
                if self._last_use[o] == i:  # many gigabytes on a GPU
                    del self._raw[o], self._known[o]
        return self._known[len(self._nodes) - 1]

    def _leaf(self, node: Node) -> Any:
        """As ``Expression.evaluate`` takes it: a Python number stays one, for torch's promotion."""
        if node.op == "input":
            return self._given[node.name]
        if node.op in {"true", "false"}:
            return torch.tensor(node.op == "true", device=self._device)
        value = self._captured[node.slot]
        if node.op == "number" and node.name:
            dtype = getattr(torch, node.name)
            return torch.tensor(value, dtype=dtype, device=self._device).reshape((1,) * node.rank)
        return value.to(self._device) if isinstance(value, torch.Tensor) else value

    def _tensor(self, raw: Any) -> Tensor:
        if isinstance(raw, torch.Tensor):
            return raw
        kind = torch.float64 if isinstance(raw, float) else None
        return torch.tensor(raw, dtype=kind, device=self._device)

    def _value(self, i: int, node: Node, operands: list[Around]) -> Around:
        value = self._tensor(self._raw[i])
        if node.op == "index":
            radius, another = read(operands[0].value, value, operands[1:])
            return Around(value, radius, another)
        if node.op == "where":
            return Around(value, *self._where(i, node, operands))
        if node.kind == "bool":
            # A truth value that may be the other one says so by its radius alone.
            return Around(value, self._truth(node, operands), self._never)
        jump = self._jumps(node, operands)
        if node.op == "cast":
            radius = self._cast(i, node, value, operands[0])
            cut = node.kind == "int"
            return Around(value, radius, jump | (radius > 0) if cut else jump)
        if node.kind == "float":
            return self._rounded(i, node, value, operands, jump)
        radius = _on_whole(node.op, value, operands)
        if node.op in JUMPS or node.op not in RADII:
            jump = jump | (radius > 0)
        return Around(value, radius, jump)

    def _jumps(self, node: Node, operands: list[Around]) -> Tensor:
        """Where an operand does, or is a truth value that is counted and may be the other one."""
        jump = self._never
        for position, operand in zip(node.operands, operands, strict=True):
            counted = self._nodes[position].kind == "bool"
            jump = jump | (operand.moves if counted else operand.jump)
        return jump

    def _where(self, i: int, node: Node, operands: list[Around]) -> tuple[Tensor, Tensor]:
        condition, *branches = operands
        if node.kind == "float":
            branches = self._roundings.operands(i, node.operands[1:], branches)
        return chosen(condition, *branches)

    def _truth(self, node: Node, operands: list[Around]) -> Tensor:
        if node.op in {"and", "or", "xor", "not"}:
            return logical(node.op, *operands)
        if node.op == "cast":
            return compared(operands[0], Around(self._zero, self._zero, self._never))
        if node.operands[0] == node.operands[1]:
            return self._zero  # torch.isnan
        return compared(*self._roundings.compared(node.operands, operands))

    def _cast(self, i: int, node: Node, value: Tensor, operand: Around) -> Tensor:
        """To a real number it is rounded, by the oracle too perhaps; to a whole one it is cut."""
        if node.kind == "float":
            (held,) = self._roundings.operands(i, node.operands, [operand])
            if self._roundings.belongs_to_the_mod(i):
                return held.radius
            return held.radius + (value.double() - operand.real).nan_to_num(nan=0.0).abs()
        if self._nodes[node.operands[0]].kind != "float":
            return operand.radius
        ends = (torch.trunc(operand.real + sign * operand.radius) for sign in (-1, 1))
        radius = torch.maximum(*((end - value.double()).abs() for end in ends))
        return _or_unknown(torch.where(operand.moves, radius, 0.0))

    def _rounded(
        self, i: int, node: Node, value: Tensor, operands: list[Around], jump: Tensor
    ) -> Around:
        """A real operation: the exact one's radius, and what its arithmetic adds."""
        real = value.double()
        if value.dtype != torch.float64:  # rounded by the oracle: not a part of the exact radius
            real = OPERATIONS[node.op](node, *(x.real for x in operands))
        operands = self._roundings.operands(i, node.operands, operands)
        operands = [self._roundings.argument(node.op, operand) for operand in operands]
        radius = _or_unknown(RADII[node.op](real, *operands))
        radius = torch.where(real.isinf() & radius.isfinite(), 0.0, radius)
        if node.op in JUMPS:
            # A remainder moves with its operands, and by its whole divisor where it jumps.
            least = operands[1].real.abs() if node.op == "remainder" else self._zero
            jump = jump | ((radius > 0) & (radius >= least) & _move(operands))
        return Around(value, self._roundings.result(i, node.op, real, radius), jump)


def _on_whole(op: str, value: Tensor, operands: list[Around]) -> Tensor:
    """Whole numbers are exact; of bits that may change nothing is said."""
    if op in RADII:
        return _or_unknown(RADII[op](value.double(), *operands))
    return torch.where(_move(operands), torch.inf, 0.0).double()


def _move(operands: list[Around]) -> Tensor:
    moves = operands[0].moves
    for operand in operands[1:]:
        moves = moves | operand.moves
    return moves


def _or_unknown(radius: Tensor) -> Tensor:
    return torch.nan_to_num(radius, nan=math.inf, posinf=math.inf)

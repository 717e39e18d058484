"""The derivative of a score mod as data, as torch's own autograd has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from attncheck.errors import TraceError
from attncheck.mods.places import described
from attncheck.mods.recording import record_gradient
from attncheck.mods.trace import trace_score

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.expression import Expression
    from attncheck.mods.signatures import ScoreMod

__all__ = ["derivative"]


def derivative(score_mod: ScoreMod, device: str = "cpu") -> Expression:
    """The expression of ∂ score_mod / ∂ score, of the arguments of a score mod.

    Where there is no derivative (a kink, a jump, the border of a ``where``) it says what torch's
    autograd of the very callable says: it is traced from that. A number that autograd has as a
    float64 one is that number: ln 2, of exp2 and log2.

    Args:
        score_mod: Any FlexAttention callable of the vocabulary (``expression.OPERATIONS``).
        device: Where the tensors are that it captures.

    Raises:
        TraceError: as ``trace_score`` of the score mod itself, and where torch has no derivative
            of an operation, or one that the vocabulary has no words for.
    """
    trace_score(score_mod, device)  # what cannot be traced is refused in the same words
    name = described("score mod", score_mod)
    examples = [torch.full((1,), 0.5, dtype=torch.float64, device=device)]
    examples += [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    try:
        recorded = record_gradient(score_mod, examples)

        def slope(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            given: Tensor = _Plainly(recorded).run(score, b, h, q_idx, kv_idx)
            return given

        return trace_score(slope, device)
    except TraceError as error:
        fact = str(error).removeprefix("score mod 'slope' cannot be traced: ").removesuffix(".")
        raise TraceError(f"{name} has no derivative that can be traced: {fact}.") from None


class _Plainly(fx.Interpreter):
    """Runs what was recorded without what the vocabulary has no words for.

    That is writing in place and some powers. Factors of 1, with which every derivative by autograd
    begins, and terms of 0 are left out: a kernel would compute with them.
    """

    def run_node(self, n: fx.Node) -> Any:
        target: Any = n.target
        args: tuple[Any, ...] = n.args
        name = target.overloadpacket.__name__ if isinstance(target, OpOverload) else ""
        neutral = {"mul": 1.0, "add": 0.0}.get(name)
        if neutral is not None and len(args) == 2 and not n.kwargs:
            for one, other in (args, args[::-1]):
                if _filled(one) == neutral and _same_dtype(n, other):
                    return self.env[other]
        if name == "pow" and args[1] in _POWERS:
            return _POWERS[args[1]](self.env[args[0]])
        if name.endswith("_") and target._schema.is_mutable:
            self.env[args[0]] = value = self._not_in_place(n)
            return value
        return super().run_node(n)

    def _not_in_place(self, n: fx.Node) -> Any:
        """What ``n`` writes: whoever reads that tensor later reads this value."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        name = target.overloadpacket.__name__.removesuffix("_")
        if name == "copy":
            return args[1].to(args[0].dtype)
        return getattr(getattr(torch.ops.aten, name), target._overloadname)(*args, **kwargs)


_POWERS: dict[float, Callable[[Tensor], Tensor]] = {
    0: torch.ones_like,
    -3: lambda x: torch.reciprocal(x * x * x),
    -1.5: lambda x: torch.reciprocal(x * torch.sqrt(x)),
}
"""Of x^n for an n of the vocabulary, x^(n − 1) where that is not of the vocabulary."""


def _filled(value: Any) -> float | None:
    """The number that a tensor was filled with; a number is itself."""
    if isinstance(value, fx.Node):
        filled = value.target is torch.ops.aten.full_like.default
        value = value.args[1] if filled else None
    return value if isinstance(value, int | float) else None


def _same_dtype(node: fx.Node, operand: Any) -> bool:
    return isinstance(operand, fx.Node) and operand.meta["val"].dtype == node.meta["val"].dtype

"""What torch's autograd recorded, run again in the words of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Plainly"]


class Plainly(fx.Interpreter):
    """Runs what was recorded without what the vocabulary has no words for.

    That is writing in place and some powers. Factors of 1, with which every derivative by autograd
    begins, and terms of 0 are left out: a kernel would compute with them.
    """

    def run_node(self, n: fx.Node) -> Any:
        """One operation, as torch's own interpreter calls it."""
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

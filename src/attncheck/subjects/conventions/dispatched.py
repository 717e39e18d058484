"""Whether a function calls torch's flash kernel of the CPU, whose exp is short, on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FlashOnTheCpu"]

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class FlashOnTheCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within, notes whether the kernel is called; changes nothing.

    Attributes:
        called: Whether it was.
    """

    supports_higher_order_operators = True  # flex_attention is one: it passes through as it is

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.called = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, which takes longer than torch itself, and Triton."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """``func`` as it is."""
        del types
        self.called |= getattr(func, "overloadpacket", None) is _FLASH
        return func(*args, **(kwargs or {}))

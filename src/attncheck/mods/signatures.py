"""FlexAttention's two signatures, as types.

They have their own module, since Specs are read where torch may not be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MaskMod: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]"
"""``mask(b, h, q_idx, kv_idx)``: index tensors in, a bool tensor (True: the row sees it) out."""

ScoreMod: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]"
"""``score(score, b, h, q_idx, kv_idx)``: the scaled q·k and its indices in, another score out."""

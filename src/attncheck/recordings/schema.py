"""What a recording holds: a safetensors file with one JSON text in its metadata.

The metadata has one entry, ``attncheck``: the JSON of a ``Header``. The tensors of call i, counted
from 0, all contiguous:

| tensor | shape | dtype |
|---|---|---|
| ``i.q`` | (batch, heads, query, head_dim) | the call's |
| ``i.k`` | (batch, kv_heads, kv, head_dim) | the call's |
| ``i.v`` | (batch, kv_heads, kv, value_dim) | the call's |
| ``i.mask`` | (batch, heads, query, kv), each axis possibly 1: the same for all | bool, or fp32, fp16 or bf16 that is added to the scores |

``i.mask`` is there for the mask kinds ``bool`` and ``additive`` alone.
"""  # noqa: E501  # a table's row is a line

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["DTYPES", "METADATA", "VERSION", "Call", "Header", "MaskKind", "tensor_name"]

VERSION = 1
METADATA = "attncheck"
DTYPES = ("fp32", "fp16", "bf16")

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Dtype = Literal["fp32", "fp16", "bf16"]
MaskKind = Literal["none", "causal", "causal_bottom_right", "bool", "additive"]


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of ``scaled_dot_product_attention``.

    Attributes:
        name: ``call-7``, or the module that made it and its how manieth call it was:
            ``blocks.0.attention/0``. Printable, and not blank.
        batch: Sequences; more axes than four are folded into this one.
        heads: Query heads.
        kv_heads: Key and value heads.
        query: Query length.
        kv: Key and value length.
        head_dim: Columns of q and k.
        value_dim: Columns of v.
        dtype: Of q, k and v: fp32, fp16 or bf16.
        mask: ``none``; ``causal`` (is_causal: row i sees keys up to i); ``causal_bottom_right``
            (torch's ``causal_lower_right``); ``bool`` (True: seen) or ``additive``.
        scale: As it was given; None for the default, 1/√head_dim.
        dropout: dropout_p. What was dropped is not known: a kernel is judged without.
    """

    name: str
    batch: Size
    heads: Size
    kv_heads: Size
    query: Size
    kv: Size
    head_dim: Size
    value_dim: Size
    dtype: Dtype
    mask: MaskKind
    scale: float | None = None
    dropout: float = 0.0

    @property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Shapes of q, k and v by name."""
        keys = (self.batch, self.kv_heads, self.kv)
        return {
            "q": (self.batch, self.heads, self.query, self.head_dim),
            "k": (*keys, self.head_dim),
            "v": (*keys, self.value_dim),
        }

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """Shape of the scores: what a mask's axes are, or 1."""
        return (self.batch, self.heads, self.query, self.kv)


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata.

    Attributes:
        version: Of this schema.
        calls: In the order in which they were made.
    """

    version: int
    calls: list[Call]


def tensor_name(call: int, tensor: str) -> str:
    """What tensor ``q``, ``k``, ``v`` or ``mask`` of a call is called in the file."""
    return f"{call}.{tensor}"

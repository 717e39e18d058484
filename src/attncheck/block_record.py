"""Which tiles a mask leaves to a kernel: what ``attncheck blocks`` is made of."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["EMPTY", "FULL", "PARTIAL", "SCHEMA", "BlockRecord", "BlockReport"]

SCHEMA = 1

EMPTY, PARTIAL, FULL = "0", "1", "2"
"""Kinds of tile in a map."""


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tiles of one size, counted over all sequences and heads.

    Attributes:
        block_query: Rows of a tile.
        block_kv: Keys of a tile.
        total: All tiles.
        empty: Those of which the mask hides every element.
        partial: Those of which it shows some, and those at a ragged edge that it shows whole.
        full: Those that are whole and of which it shows every element.
        sparsity: empty ÷ total.
        speedup: total ÷ tiles that are not empty: how much faster a kernel would be whose time is
            that of the tiles it visits; None where all are empty.
        map: The kinds of the first sequence's and head's tiles, a text for each query block with a
            digit for each key block; nothing where it was not asked for.
    """

    block_query: int
    block_kv: int
    total: int
    empty: int
    partial: int
    full: int
    sparsity: float
    speedup: float | None
    map: tuple[str, ...] = ()


class BlockReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records with what they share.

    Attributes:
        schema: Version of this layout.
        command: The command line that made it, without paths.
        attncheck: Version.
        mask: The mask, as a Problem names it.
        name: The mask in a line.
        batch, heads, query, kv: Ranges of b, h, q_idx and kv_idx.
        records: One a size of tile, in the order asked for.
    """

    schema: int = SCHEMA
    command: str
    attncheck: str
    mask: dict[str, Any]
    name: str
    batch: int
    heads: int
    query: int
    kv: int
    records: tuple[BlockRecord, ...]

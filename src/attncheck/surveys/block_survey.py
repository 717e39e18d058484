"""Count a mask's tiles at every block size: one BlockReport."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict

from attncheck.core import VERSION
from attncheck.core.errors import ProblemError, UnknownName, UsageError, without_recorded
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods.block_mask import EMPTY, FULL, PARTIAL, block_mask
from attncheck.mods.library import build_mask
from attncheck.mods.masks import MASKS
from attncheck.mods.mod_files import load_mask
from attncheck.mods.signatures import MaskMod
from attncheck.records.survey_reports import BlockRecord, BlockReport

_SIZE = r"([1-9]\d{0,6})"
_MOST_TILES = 2**24  # Classifying so many tiles takes some gigabytes.
_BLOCK = re.compile(f"{_SIZE}x{_SIZE}")


def mask_of(text: str) -> Spec:
    """Return the mask as typed: a name of the library, a Spec in JSON, or ``FILE.py::NAME``.

    Raises:
        UsageError: for a text that is none of these, or an unusable mask of a file
            (``mods.mod_files``). A library mask is checked when it is built.
    """
    if text.lstrip().startswith("{"):
        try:
            return Spec.from_json(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UsageError(f"mask {text!r} is no JSON: {error}.") from None
    if "::" in text or text.endswith(".py"):  # load_mask raises if one of the two is missing
        return load_mask(text)
    if text not in MASKS:
        raise UnknownName("mask", text, without_recorded(MASKS))
    if MASKS[text].arguments or MASKS[text].compose:
        raise ProblemError(
            f"mask {text!r} needs numbers or parts: write it as JSON, "
            f'{{"name": "{text}", …}}, or as FILE.py::NAME.'
        )
    return Spec.of(text)


def blocks_of(text: str) -> tuple[int, int]:
    """Return (rows, keys) of a tile from ``ROWSxKEYS``; raises UsageError for anything else."""
    match = _BLOCK.fullmatch(text.strip().lower())
    if not match:
        raise UsageError(f"block {text!r} is not ROWSxKEYS, such as 128x64.")
    return int(match[1]), int(match[2])


def survey_blocks(
    mask: Spec,
    dimensions: Dimensions,
    blocks: Sequence[tuple[int, int]],
    *,
    mapped: bool,
    command: str,
    done: Callable[[], None] = lambda: None,
) -> BlockReport:
    """Return a report with the number of empty, partial and full tiles of ``mask``.

    Args:
        mask: A library mask, or a file's that ``load_mask`` has added to the library.
        blocks: (rows, keys) of a tile, for each record.
        mapped: Whether records contain the map of tiles of the first sequence and head.
        done: Called after each record.

    Raises:
        UnknownName: for a mask that the library does not have.
        ProblemError: for a mask that does not fit the dimensions.
        UsageError: for too many tiles.
    """
    # Checked before anything is built, because a table of that many tiles might not fit.
    for rows, keys in blocks:
        tiles = -(-dimensions.query // rows) * -(-dimensions.kv // keys)
        tiles *= dimensions.batch * dimensions.heads
        if tiles > _MOST_TILES:
            raise UsageError(
                f"tiles of {rows}x{keys} are {tiles:,}: at most {_MOST_TILES:,} are counted. "
                "Choose larger tiles, or shorter lengths."
            )
    mod = build_mask(mask, dimensions)
    records = []
    # A size that is given twice has one record.
    for size in dict.fromkeys(blocks):
        records.append(_record(mod, dimensions, size, mapped=mapped))
        done()
    return BlockReport(
        command=command,
        attncheck=VERSION,
        mask=mask.to_json(),
        name=str(mask),
        **asdict(dimensions),
        records=tuple(records),
    )


def _record(
    mod: MaskMod, dimensions: Dimensions, size: tuple[int, int], *, mapped: bool
) -> BlockRecord:
    kinds = block_mask(mod, dimensions, block_query=size[0], block_kv=size[1]).kinds
    # One table stands for all sequences or heads if the mask does not depend on them.
    copies = dimensions.batch // kinds.shape[0] * (dimensions.heads // kinds.shape[1])
    empty, partial, full = (int((kinds == kind).sum()) * copies for kind in (EMPTY, PARTIAL, FULL))
    total = empty + partial + full
    return BlockRecord(
        block_query=size[0],
        block_kv=size[1],
        total=total,
        empty=empty,
        partial=partial,
        full=full,
        sparsity=empty / total,
        # None for a mask that hides everything, which leaves no work to compare with.
        speedup=total / (total - empty) if total > empty else None,
        map=tuple("".join(map(str, row)) for row in kinds[0, 0].tolist()) if mapped else (),
    )

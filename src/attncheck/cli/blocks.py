"""``attncheck blocks``: which tiles does a mask leave to a kernel?"""

from __future__ import annotations

import click

from attncheck.cli import verb
from attncheck.cli.options import typed_command
from attncheck.cli.standard_output import interrupts, show_report
from attncheck.core.mod_spec import Dimensions

DEFAULT_LENGTH, MOST = 4096, 2**20
DEFAULT_BLOCK = "128x128"

_SIZE = click.IntRange(1, MOST)


@verb.command
def blocks(
    *,
    mask: str = verb.argument("MASK"),
    query: int = verb.option(
        "--query", "N", "Number of rows of the mask.", DEFAULT_LENGTH, type=_SIZE
    ),
    kv: int | None = verb.option(
        "--kv", "N", "Number of keys of the mask (default: as many as rows).", type=_SIZE
    ),
    batch: int = verb.option(
        "--batch", "N", "Number of sequences, for a mask that depends on b.", 1, type=_SIZE
    ),
    heads: int = verb.option(
        "--heads", "N", "Number of query heads, for a mask that depends on h.", 1, type=_SIZE
    ),
    sizes: tuple[str, ...] = verb.several(
        "--block",
        "ROWSxKEYS",
        f"Size of a tile (repeatable; default: {DEFAULT_BLOCK}).",
    ),
    mapped: bool = verb.flag("--map", "Also draw the tiles of the first sequence and head."),
    as_json: bool = verb.as_json(),
) -> int:
    """Count the tiles that a mask leaves empty, partial and full.

    MASK is a mask's name in `attncheck list`, a mask in JSON such as '{"name": "prefix_lm",
    "prefix": 64}', or FILE.py::NAME.

    A kernel with a block mask, FlexAttention's or attncheck's, skips the empty tiles, and applies
    the mask in the partial ones.
    """
    with interrupts.importing():
        from attncheck.surveys.block_survey import blocks_of, mask_of, survey_blocks
    block_sizes = [blocks_of(size) for size in sizes or (DEFAULT_BLOCK,)]
    report = survey_blocks(
        mask_of(mask),
        Dimensions(batch=batch, heads=heads, query=query, kv=kv or query),
        block_sizes,
        mapped=mapped,
        command=typed_command(arguments=[mask] if "::" in mask else []),
        done=interrupts.check,
    )
    return show_report(report, "json" if as_json else "table")

"""``attncheck blocks``: which tiles does a mask leave to a kernel?"""

from __future__ import annotations

import click

from attncheck.cli.options import typed_command
from attncheck.cli.standard_output import Interrupts, Verb, standard_output

DEFAULT_LENGTH, MOST = 4096, 2**20
DEFAULT_BLOCK = "128x128"

_SIZE = click.IntRange(1, MOST)


@click.command(cls=Verb)
@click.argument("mask", metavar="MASK")
@click.option(
    "--query",
    type=_SIZE,
    default=DEFAULT_LENGTH,
    show_default=True,
    metavar="N",
    help="Rows of the mask.",
)
@click.option("--kv", type=_SIZE, metavar="N", help="Keys of the mask (default: as many as rows).")
@click.option(
    "--batch",
    type=_SIZE,
    default=1,
    show_default=True,
    metavar="N",
    help="Sequences, for a mask that reads b.",
)
@click.option(
    "--heads",
    type=_SIZE,
    default=1,
    show_default=True,
    metavar="N",
    help="Query heads, for a mask that reads h.",
)
@click.option(
    "--block",
    "sizes",
    multiple=True,
    metavar="ROWSxKEYS",
    help=f"Size of a tile, any numbers (repeatable; default: {DEFAULT_BLOCK}).",
)
@click.option(
    "--map", "mapped", is_flag=True, help="Also draw the tiles of the first sequence and head."
)
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output, nothing else.")
@click.make_pass_decorator(Interrupts, ensure=True)
def blocks(  # noqa: PLR0913  # one parameter per option
    interrupts: Interrupts,
    /,
    *,
    mask: str,
    query: int,
    kv: int | None,
    batch: int,
    heads: int,
    sizes: tuple[str, ...],
    mapped: bool,
    as_json: bool,
) -> None:
    """Count the tiles that a mask leaves empty, partial and full.

    MASK is a name of the library, a mask in JSON such as '{"name": "prefix_lm", "prefix": 64}', or
    FILE.py::NAME.

    A kernel with a block mask, FlexAttention's or ours, skips the empty tiles, and applies the mask
    in the partial ones.
    """
    from attncheck.core.mod_spec import Dimensions
    from attncheck.reporting import rendering
    from attncheck.surveys.block_survey import blocks_of, mask_of, survey_blocks

    interrupts.check()  # the imports above take a while, and may have swallowed one
    wanted = [blocks_of(size) for size in sizes or (DEFAULT_BLOCK,)]
    report = survey_blocks(
        mask_of(mask),
        Dimensions(batch=batch, heads=heads, query=query, kv=kv or query),
        wanted,
        mapped=mapped,
        command=typed_command(argument=mask if "::" in mask else ""),
        done=interrupts.check,
    )
    with standard_output():
        rendering.show(report, "json" if as_json else "table")

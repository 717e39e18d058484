"""Options that several verbs have, each written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["device_option", "format_option", "out_option", "quiet_option", "seed_option"]

F = TypeVar("F", bound="Callable[..., Any]")

seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Which draw of the inputs.",
)

quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress.")


def device_option(what: str) -> Callable[[F], F]:
    """``--device``; ``what`` runs there, and the rest of the sentence is said of it."""
    return click.option("--device", type=click.Choice(["cpu", "cuda"]), help=what)


def format_option(names: str) -> Callable[[F], F]:
    """``--format`` of standard output, one of ``names``."""
    return click.option(
        "--format",
        "fmt",
        default="table",
        show_default=True,
        metavar="FORMAT",
        help=f"Of standard output: {names}.",
    )


def out_option(files: str) -> Callable[[F], F]:
    """``--out``: the folder, ``reports`` unless told, for ``files``."""
    return click.option(
        "--out",
        "directory",
        default="reports",
        show_default=True,
        metavar="DIR",
        help=f"Folder for {files}.",
    )

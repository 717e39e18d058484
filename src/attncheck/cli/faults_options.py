"""The options of ``attncheck faults``, and what was typed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attncheck.cli.as_typed import as_typed
from attncheck.cli.options import device_option, quiet_option

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FaultsAsked", "faults_options"]

F = TypeVar("F", bound="Callable[..., Any]")

_FILES = {"--kernel-file", "--json", "--md"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsAsked:
    """What was typed, by the names of the options below."""

    host: str
    names: tuple[str, ...]
    categories: tuple[str, ...]
    tier: str | None
    device: str | None
    file: str | None
    command: str | None
    replace: str | None
    convention: str
    small: bool
    dtypes: tuple[str, ...]
    jobs: int | None
    json_file: str | None
    md_file: str | None
    controls: bool | None
    listed: bool
    fresh: bool
    max_time: str | None
    directory: str
    quiet: bool
    verbose: bool

    @property
    def outputs(self) -> list[tuple[str, str]]:
        """Files that are asked for, each with its format."""
        named = ((self.json_file, "json"), (self.md_file, "md"))
        return [(file, fmt) for file, fmt in named if file]

    @property
    def typed(self) -> str:
        """The command line, for a report."""
        return as_typed(files=_FILES)


_WHICH = (
    click.option(
        "--host",
        default="all",
        show_default=True,
        metavar="NAME",
        help="In which kernel faults are planted: triton, ideal or all.",
    ),
    click.option(
        "--fault", "names", multiple=True, metavar="ID", help="Only this one (repeatable)."
    ),
    click.option(
        "--category",
        "categories",
        multiple=True,
        metavar="NAME",
        help="Only faults of this category (repeatable).",
    ),
    click.option(
        "--tier",
        metavar="NAME",
        help="How hard the gate asks: smoke, pr or nightly (default: smoke on a cpu, pr on cuda).",
    ),
    device_option(
        "Where kernels run (default: cuda where there is a GPU; on a cpu Triton kernels are "
        "interpreted)."
    ),
)
_OF_WHOM = (
    click.option(
        "--kernel-file",
        "file",
        metavar="FILE.py",
        help='Score on faults of your own: FAULTS = {"id": kernel, …} of the file, or its public '
        "functions and Subjects, each of which is wrong.",
    ),
    click.option(
        "--pytest",
        "command",
        metavar="ARGS",
        help='Score your own tests: what follows pytest, such as "tests/ -k attn". They run once '
        "with a right kernel in place of your function, then once with each fault.",
    ),
    click.option(
        "--replace",
        metavar="package.module:NAME",
        help="With --pytest: the function that they test.",
    ),
    click.option(
        "--convention",
        default="",
        metavar="NAME",
        help="With --pytest: how the function is called (default: what it shows).",
    ),
    click.option(
        "--sensitivity",
        "small",
        is_flag=True,
        help="How small a fault is still seen: of the softmax scale, of one weight, of few bits.",
    ),
    click.option(
        "--dtype",
        "dtypes",
        multiple=True,
        metavar="NAME",
        help="With --sensitivity: only in this dtype (repeatable).",
    ),
)
_RUN = (
    click.option(
        "--jobs",
        type=click.IntRange(1, 256),
        metavar="N",
        help="Faults at work at the same time (default: by cores and GPUs, at most 4 for each).",
    ),
    click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON."),
    click.option("--md", "md_file", metavar="FILE", help="Write the report as Markdown."),
    click.option(
        "--controls/--no-controls",
        default=None,
        help="Whether changes that are no faults are asked too (default: where no fault or "
        "category is named).",
    ),
    click.option("--list", "listed", is_flag=True, help="Show the faults, and run none."),
    click.option("--fresh", is_flag=True, help="Forget an unfinished run, in place of going on."),
    click.option("--max-time", metavar="TIME", help="Stop then, such as 10m; resumable."),
    click.option(
        "--out",
        "directory",
        default="reports/faults",
        show_default=True,
        metavar="DIR",
        help="Folder for the journal.",
    ),
    quiet_option,
    click.option("-v", "--verbose", is_flag=True, help="Each score in a line as it is known."),
)


def faults_options(function: F) -> F:
    """All of them, in the order in which ``--help`` shows them."""
    return reduce(lambda made, option: option(made), reversed(_WHICH + _OF_WHOM + _RUN), function)

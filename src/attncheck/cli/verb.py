"""Declarations of verbs, the commands of the command line, with their arguments and options.

The declaration of an option is the default of a parameter, or of a dataclass's field::

    @verb.command
    def blocks(*, mask: str = verb.argument("MASK")) -> None: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from functools import partial, wraps
from typing import Any, get_type_hints

import click

from attncheck.cli.standard_output import Verb
from attncheck.core.errors import parse_seconds


def option(flags: str, metavar: str, text: str, default: Any = None, **how: Any) -> Any:
    """Return the declaration of an option: the default of a verb's parameter, or a field.

    Args:
        flags: The flags, with spaces between them.
        metavar: Name of its value in ``--help``; empty for click's own name.
        text: Its text in ``--help``, to which the default is appended if there is one.
        how: Other arguments of ``click.Option``.
    """
    how = {"metavar": metavar or None, "help": text, **how}
    if (default not in (None, ()) and default is not False) or "/" in flags:
        how |= {"default": default, "show_default": default != ""}
    return field(default=default, metadata={"flags": flags.split(), "how": how})


def several(flags: str, metavar: str, text: str, **how: Any) -> Any:
    """Return the declaration of an option that may be repeated; its value is a tuple."""
    return option(flags, metavar, text, (), multiple=True, **how)


def flag(flags: str, text: str) -> Any:
    """Return the declaration of an option without a value."""
    return option(flags, "", text, default=False, is_flag=True)


def argument(metavar: str, **how: Any) -> Any:
    """Return the declaration of a positional argument."""
    many: dict[str, Any] = {"default": ()} if how.get("nargs") == -1 else {}
    return field(**many, metadata={"flags": None, "how": {"metavar": metavar or None, **how}})


def command(function: Callable[..., int | None]) -> Verb:
    """Return the command of a function, whose parameters are the declared arguments and options.

    A parameter of a dataclass type receives that class's declared fields. The function returns the
    exit code.
    """
    declared: dict[str, Any] = {}
    dataclass_fields: dict[str, tuple[Any, list[str]]] = {}
    for name, kind in get_type_hints(function).items():
        if is_dataclass(kind):
            dataclass_fields[name] = kind, [one.name for one in fields(kind)]
            declared |= {one.name: one for one in fields(kind)}
        elif name != "return":
            declared[name] = inspect.signature(function).parameters[name].default

    @wraps(function)
    def callback(**typed: Any) -> int | None:
        for name, (kind, names) in dataclass_fields.items():
            typed[name] = kind(**{one: typed.pop(one) for one in names})
        return function(**typed)

    parameters: list[click.Parameter] = []
    for name, one in declared.items():
        flags, how = one.metadata["flags"], one.metadata["how"]
        parameters.append(
            click.Argument([name], **how) if flags is None else click.Option([*flags, name], **how)
        )
    name = function.__name__.rstrip("_")
    return click.command(name, cls=Verb, params=parameters)(callback)


GPU = "cuda where there is a GPU"
_DTYPES = "fp32, tf32, fp16, bf16, e4m3 or e5m2"


def device(what: str, default: str = f"{GPU}; on a cpu Triton kernels are interpreted") -> Any:
    """Return ``--device``; ``what`` begins its help text."""
    text = f"{what} (default: {default})."
    return option("--device", "", text, type=click.Choice(["cpu", "cuda"]))


def kernels(default: str) -> Any:
    """Return ``--kernel`` of a verb that takes several kernels."""
    text = f"A kernel of `attncheck list`, or FILE.py::NAME (repeatable; default: {default})."
    return several("--kernel", "NAME", text)


def dtypes(default: str) -> Any:
    """Return ``--dtype``."""
    return several("--dtype", "NAME", f"{_DTYPES} (repeatable; default: {default}).")


def convention(default: str, what: str = "How the kernel is called") -> Any:
    """Return ``--convention``, which is empty by default."""
    return option("--convention", "NAME", f"{what} (default: {default}).", "")


def jobs(what: str) -> Any:
    """Return ``--jobs``: the number of ``what`` at the same time."""
    text = (
        f"Number of {what} run at the same time (default: by cores, at most 4, or 16 for each GPU)."
    )
    return option("--jobs", "N", text, type=click.IntRange(1, 256))


def max_time(then: str) -> Any:
    """Return ``--max-time``."""
    return option("--max-time", "TIME", f"Stop after this time, such as 10m{then}.")


def plots(draws: str) -> Any:
    """Return ``--plot``."""
    text = f"{draws}, to FILE.png or FILE.svg (repeatable; needs attncheck[plot])."
    return several("--plot", "FILE", text)


def fmt(names: str = "table, json, md, csv or html") -> Any:
    """Return ``--format`` of standard output.

    ``names`` is only for the help text: other formats are refused by ``rendering``, which is
    loaded when a report is shown and not for ``--help``.
    """
    return option("--format", "FORMAT", f"Format of standard output: {names}.", "table")


def out(files: str, directory: str = "reports") -> Any:
    """Return ``--out``, the folder for ``files``."""
    return option("--out", "DIR", f"Folder for {files}.", directory)


def _parse_time(_: click.Context, parameter: click.Parameter, typed: str | None) -> float | None:
    return parse_seconds(typed, parameter.opts[0])


# Options that are the same in every verb.
as_json = partial(flag, "--json", "Print JSON only.")
fresh = partial(flag, "--fresh", "Start anew instead of resuming an unfinished run.")
in_process = partial(
    flag,
    "--in-process",
    "Call kernels in attncheck's own process, for a debugger: a crash then ends the run.",
)
quiet = partial(flag, "-q --quiet", "Show no progress.")
seed = partial(option, "--seed", "", "Seed of the random inputs.", 0, type=click.IntRange(min=0))
timeout = partial(
    option,
    "--timeout",
    "TIME",
    "Time limit for one call of a kernel, such as 90s.",
    callback=_parse_time,
)

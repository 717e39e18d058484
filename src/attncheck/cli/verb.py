"""A verb of the command line: its function, with each argument and option declared once.

The declaration of an option is the default of a parameter, or of a dataclass's field::

    @verb.command
    def blocks(interrupts: Interrupts, *, mask: str = verb.argument("MASK")) -> None: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import click

from attncheck.cli.standard_output import Interrupts, Verb


def option(flags: str, metavar: str, text: str, default: Any = None, **how: Any) -> Any:
    """Return the declaration of an option: the default of a verb's parameter, or a field.

    Args:
        flags: As typed, with spaces between them.
        metavar: What stands for its value in ``--help``; empty for click's own word.
        text: What ``--help`` says of it; the default follows where there is one.
        how: What else ``click.Option`` takes.
    """
    how = {"metavar": metavar or None, "help": text, **how}
    if (default not in (None, ()) and default is not False) or "/" in flags:
        how |= {"default": default, "show_default": default != ""}
    return field(default=default, metadata={"flags": flags.split(), "how": how})


def several(flags: str, metavar: str, text: str, **how: Any) -> Any:
    """Return the declaration of an option that may be given more than once: a tuple."""
    return option(flags, metavar, text, (), multiple=True, **how)


def flag(flags: str, text: str) -> Any:
    """Return the declaration of an option without a value."""
    return option(flags, "", text, default=False, is_flag=True)


def argument(metavar: str, **how: Any) -> Any:
    """Return the declaration of a word without an option."""
    many: dict[str, Any] = {"default": ()} if how.get("nargs") == -1 else {}
    return field(**many, metadata={"flags": None, "how": {"metavar": metavar or None, **how}})


def command(function: Callable[..., int | None]) -> Verb:
    """Return the command of a function: each parameter that is declared above is typed by a user.

    A parameter that is a dataclass has the declared fields of that; one that is an Interrupts is
    the running one. What the function returns is the exit code.
    """
    declared: dict[str, Any] = {}
    of_class: dict[str, tuple[Any, list[str]]] = {}
    hints = get_type_hints(function)
    for name, kind in hints.items():
        if is_dataclass(kind):
            of_class[name] = kind, [one.name for one in fields(kind)]
            declared |= {one.name: one for one in fields(kind)}
        elif kind is not Interrupts and name != "return":
            declared[name] = inspect.signature(function).parameters[name].default

    @wraps(function)
    def callback(**typed: Any) -> int | None:
        running = click.get_current_context().ensure_object(Interrupts)
        for name, (kind, names) in of_class.items():
            typed[name] = kind(**{one: typed.pop(one) for one in names})
        return function(*[running] * (Interrupts in hints.values()), **typed)

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
    """``--device``, where ``what`` happens."""
    text = f"{what} (default: {default})."
    return option("--device", "", text, type=click.Choice(["cpu", "cuda"]))


def kernels(default: str) -> Any:
    """``--kernel`` of a verb that takes several."""
    text = f"A kernel of `attncheck list`, or FILE.py::NAME (repeatable; default: {default})."
    return several("--kernel", "NAME", text)


def dtypes(default: str) -> Any:
    """``--dtype``."""
    return several("--dtype", "NAME", f"{_DTYPES} (repeatable; default: {default}).")


def convention(default: str, what: str = "How the kernel is called") -> Any:
    """``--convention``; empty where nobody says."""
    return option("--convention", "NAME", f"{what} (default: {default}).", "")


def jobs(what: str) -> Any:
    """``--jobs``: how many of ``what`` at a time."""
    text = f"{what} at work at the same time (default: by cores, at most 4, or 16 for each GPU)."
    return option("--jobs", "N", text, type=click.IntRange(1, 256))


def max_time(then: str) -> Any:
    """``--max-time``."""
    return option("--max-time", "TIME", f"Stop then, such as 10m{then}.")


def fresh() -> Any:
    """``--fresh`` of a run with a journal."""
    return flag("--fresh", "Forget an unfinished run, in place of going on.")


def plots(draws: str) -> Any:
    """``--plot``."""
    text = f"{draws}, to FILE.png or FILE.svg (repeatable; needs attncheck[plot])."
    return several("--plot", "FILE", text)


def seed() -> Any:
    """``--seed`` of the inputs."""
    return option("--seed", "", "Which draw of the inputs.", 0, type=click.IntRange(min=0))


def quiet() -> Any:
    """``--quiet``."""
    return flag("-q --quiet", "No progress.")


def as_json() -> Any:
    """``--json`` on standard output."""
    return flag("--json", "JSON on standard output, nothing else.")


def timeout() -> Any:
    """``--timeout`` of a call."""
    return option("--timeout", "TIME", "Of one call of a kernel, such as 90s.")


def in_process() -> Any:
    """``--in-process``."""
    text = "For a debugger: call kernels in the judge's process, where they can break it."
    return flag("--in-process", text)


def fmt(names: str = "table, json, md, csv or html") -> Any:
    """``--format`` of standard output, one of ``names``.

    The names are words for the help alone: what is not a format is refused by ``rendering``,
    which is loaded when a report is shown and not for ``--help``.
    """
    return option("--format", "FORMAT", f"Of standard output: {names}.", "table")


def out(files: str, directory: str = "reports") -> Any:
    """``--out``: the folder for ``files``."""
    return option("--out", "DIR", f"Folder for {files}.", directory)

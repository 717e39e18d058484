"""``attncheck completion``: the script by which a shell completes words, and the completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from attncheck.cli import verb
from attncheck.cli.standard_output import standard_output
from attncheck.core.errors import UsageError
from attncheck.core.formats import MEASURED_DTYPES

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_ATTNCHECK_COMPLETE"
_CONVENTIONS = ("flash_attn", "flex", "native", "paged", "sdpa", "varlen")
_FORMATS = ("table", "json", "md", "csv", "html")


@verb.command
def completion(
    *,
    shell: str = verb.argument("", type=click.Choice(_SHELLS)),
) -> None:
    """Print the script by which a SHELL completes verbs, options, kernels, dtypes and so on.

    bash: eval "$(attncheck completion bash)" in ~/.bashrc; zsh likewise in ~/.zshrc; fish:
    attncheck completion fish > ~/.config/fish/completions/attncheck.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(click.Group(), {}, "attncheck", _VARIABLE)
    with standard_output():
        # Unlike ``source()``, this does not start a bash to ask for its version.
        click.echo(script.source_template % script.source_vars())


def complete(group: click.Group, instruction: str) -> int:
    """Print the completions of a word for the shell; return the exit code."""
    for command in group.commands.values():
        for parameter in command.params:
            names = _NAMES.get(parameter.opts[0])
            if names is not None:
                parameter.shell_complete = partial(_offer, names)  # type: ignore[method-assign]  # of this one alone
    return shell_complete(group, {}, "attncheck", _VARIABLE, instruction)


def _offer(
    names: Callable[[], Iterable[str]], _: click.Context, incomplete: str
) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(names()) if name.startswith(incomplete)]


# Each of these imports no heavy module, since a user who presses a key must not wait for torch.
def _kernels() -> Iterable[str]:
    from attncheck.subjects.capabilities.configuration import read_configuration
    from attncheck.subjects.capabilities.named_kernels import BUILTIN

    try:
        configured = tuple(read_configuration().kernels)
    except UsageError:  # reported when the file is used
        configured = ()
    return {*BUILTIN, *configured, *(f"{path.name}::" for path in Path.cwd().glob("*.py"))}


def _variants() -> Iterable[str]:
    from attncheck.cases.variants import OPTIONAL_VARIANTS, VARIANTS

    return {*VARIANTS, *OPTIONAL_VARIANTS}


def _questions() -> Iterable[str]:
    from attncheck.cases.named_problems import CHECK, PROBED, tagged

    return {*tagged(CHECK), *(f"decode-{name}" for name in tagged(PROBED))}


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    **dict.fromkeys(("spec", "kernel", "kernels", "--kernel"), _kernels),
    "--dtype": lambda: MEASURED_DTYPES,
    "--variant": _variants,
    "--question": _questions,
    "--convention": lambda: _CONVENTIONS,
    "--format": lambda: _FORMATS,
}

"""``attncheck mods``: do all backends agree on a file's masks and score mods?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncheck.cli import verb
from attncheck.cli.long_runs import progress
from attncheck.cli.options import not_applicable, open_kernels, start_worker, typed_command
from attncheck.cli.standard_output import interrupts, show_report
from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Dimensions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.kernel_hosts import KernelHost

DEFAULT_SHAPE = "2x2x40/48"


@verb.command
def mods(
    *,
    file: str = verb.argument("FILE.py[::NAME]"),
    kernels: tuple[str, ...] = verb.kernels("all built in that support score mods"),
    shape: str = verb.option(
        "--shape",
        "BxHxL",
        "Ranges of b, h, q_idx and kv_idx; 2x4x40/48 is 40 queries on 48 keys.",
        DEFAULT_SHAPE,
    ),
    device: str | None = verb.device("Where kernels run and captured tensors are made", verb.GPU),
    fmt: str = verb.fmt(),
    quiet: bool = verb.quiet(),
) -> int:
    """Compare FlexAttention mods, as mpmath and each kernel compute them, with the functions.

    A mod is a public function of the file with the parameters (b, h, q_idx, kv_idx), or with
    (score, b, h, q_idx, kv_idx).

    Exit code 1 when a backend differs or raises, or where nothing can be said of a value (unknown:
    it may be NaN); 2 when a mod cannot be traced.
    """
    # The file is loaded in another process first, so that it cannot end this one.
    trial = start_worker(file, in_process=False, echo=False)
    workers = {each: start_worker(each, in_process=False) for each in kernels}
    with interrupts.importing():
        from attncheck.reporting import rendering
        from attncheck.surveys.mod_survey import dimensions_of, mods_of_file, survey_mods
        from attncheck.verify.environment import prepare, usable_device
        from attncheck.verify.kernel_hosts import try_mods
    rendering.check_format(fmt)
    device = usable_device(device)
    dimensions = dimensions_of(shape)
    prepare(device)  # before any Triton functions are decorated
    path = file.partition("::")[0]
    with open_kernels(workers, device=device, mods={"file": path}) as hosts:
        subjects = _subjects(hosts, device)
        if trial is not None and Path(path).suffix == ".py" and Path(path).is_file():
            try_mods({"file": path}, trial, device=device)
        file_mods = mods_of_file(file, device)
        # Without its folder, since a report may be read elsewhere.
        name = Path(path).name
        # Report all mods that cannot be traced before the comparisons, which take longer.
        _refuse(file_mods, name, dimensions, device)
        with progress("mod", len(file_mods), quiet=quiet) as advance:
            report = survey_mods(
                file_mods,
                subjects,
                file=name,
                dimensions=dimensions,
                device=device,
                command=typed_command(files={"--kernel"}, arguments=[file]),
                done=advance,
                path=path,
            )
    return show_report(report, fmt)


def _refuse(
    file_mods: dict[str, Callable[..., Any]], file: str, dimensions: Dimensions, device: str
) -> None:
    """Print a line for each mod that cannot be compared; raise UsageError if there is one."""
    from attncheck.surveys.mod_survey import refusals

    *others, last = refusals(file_mods, file, dimensions, device) or [""]
    for reason in others:
        click.echo(f"attncheck: {reason}", err=True)
    if last:
        raise UsageError(last)


def _subjects(hosts: Mapping[str, KernelHost], device: str) -> list[Subject]:
    """Return the kernels to compare; raise UsageError for a named one without masks or mods."""
    from attncheck.subjects.capabilities import named_kernels
    from attncheck.surveys.mod_survey import concerns_mods, takes_any_mod

    if not hosts:
        subjects = [named_kernels.subject_named(name) for name in named_kernels.builtin_names()]
        # Kernels that support only some mods would fill the table with refusals.
        return [subject for subject in subjects if takes_any_mod(subject, device)]
    named = [host.subject for host in hosts.values()]
    for subject in named:
        if not concerns_mods(subject):
            raise UsageError(not_applicable(subject))
    return named

"""What ``attncheck rmse`` measures, from its options; and options that leave no room for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from attncheck.cli.subjects import named, unconcerned

if TYPE_CHECKING:
    from attncheck.capabilities.subject import Subject
    from attncheck.cases.variants import Cell

__all__ = [
    "cells_of",
    "given",
    "refuse_beside",
    "refuse_unconcerned",
    "subjects_of",
    "without_gradients",
]


def cells_of(  # noqa: PLR0913  # one parameter per option
    *,
    variants: tuple[str, ...],
    mask: str | None,
    score: str | None,
    recording: str | None,
    dtypes: tuple[str, ...],
    shapes: tuple[str, ...],
    distributions: tuple[str, ...],
    seed: int,
    device: str,
    backward: bool,
) -> list[Cell]:
    """What the options ask for: recorded inputs, own mods, or variants."""
    from attncheck.cases.variants import DEFAULT_SHAPES, own_variant, plan_cells, recorded_cells
    from attncheck.verify.environment import prepare

    if recording is not None:
        replaced = ("variants", "mask", "score", "shapes", "distributions", "seed")
        refuse_beside("--inputs", replaced)
        return _asking(recorded_cells(recording, dtypes), backward=backward)
    own = mask is not None or score is not None
    if own:
        refuse_beside("--mask or --score", ("variants",))
        prepare(device)  # torch's tracer imports Triton, which decides then how kernels run
    return plan_cells(
        dtypes=dtypes or ("bf16",),
        variants=variants,
        own=own_variant(mask, score) if own else None,
        shapes=shapes or (DEFAULT_SHAPES[device],),
        distributions=distributions or ("normal",),
        seed=seed,
        backward=backward,
    )


def _asking(cells: list[Cell], *, backward: bool) -> list[Cell]:
    """The recorded cells; raises ProblemError where gradients are asked for and cannot be."""
    from attncheck.cases.variants import check_memory

    if backward:
        cells = [cell.asking(backward=True) for cell in cells]
        for cell in cells:
            check_memory(cell.problem)
    return cells


def refuse_unconcerned(cells: list[Cell], subjects: list[Subject]) -> None:
    """Raises UsageError for a kernel asked for by name that nothing asked for concerns."""
    from attncheck.core.errors import UsageError
    from attncheck.verify.verify import applicable_subjects

    for subject in subjects:
        if not applicable_subjects([cell.problem for cell in cells], [subject]):
            if without_gradients(cells, [subject]):
                raise UsageError(f"kernel {subject.name!r} gives no gradients: see attncheck list.")
            raise UsageError(unconcerned(subject))


def without_gradients(cells: list[Cell], subjects: list[Subject]) -> str:
    """The kernels that no backward of ``cells`` concerns, though its forward does; by comma."""
    from attncheck.verify.verify import applicable_subjects

    if not any(cell.problem.backward for cell in cells):
        return ""
    asked = applicable_subjects([cell.problem for cell in cells], subjects)
    others = [subject for subject in subjects if subject not in asked]
    forward = [cell.asking(backward=False).problem for cell in cells]
    return ", ".join(subject.name for subject in applicable_subjects(forward, others))


def refuse_beside(
    option: str, others: tuple[str, ...], says: str = "already says what to compute"
) -> None:
    """Raises UsageError when an option that ``option`` takes the place of is given too.

    Also as its default, or as nothing: ``--seed 0``, ``--mask ""``.
    """
    from attncheck.core.errors import UsageError

    parameters = click.get_current_context().command.params
    typed = [p.opts[0] for p in parameters if p.name in others and given(p.name)]
    if typed:
        raise UsageError(f"{option} {says}: leave out {' and '.join(typed)}.")


def subjects_of(kernels: tuple[str, ...], device: str) -> list[Subject]:
    """The kernels asked for, or all built in."""
    from attncheck.capabilities import named_kernels
    from attncheck.verify.environment import prepare

    if any(":" in kernel for kernel in kernels):
        prepare(device)  # before the file's own Triton functions are decorated
    return named(kernels or named_kernels.builtin_names())


def given(name: str) -> bool:
    """Whether the option of this parameter was typed, be it as its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE

"""``attncheck list``: kernels, variants, dtypes and mods, and on demand what supports what."""

from __future__ import annotations

import json
from typing import Any

import click

from attncheck.cli import verb
from attncheck.cli.standard_output import standard_output
from attncheck.core.formats import DTYPES, MEASURED_DTYPES


@verb.command
def list_(
    *,
    support: bool = verb.flag(
        "--support", "List which variants each kernel supports on this device, too (loads torch)."
    ),
    as_json: bool = verb.flag(
        "--json",
        "Print JSON only; it has `support` and `device` only with --support.",
    ),
    device: str | None = verb.option(
        "--device",
        "",
        "Device for --support (default: cuda where there is a GPU).",
        type=click.Choice(["cpu", "cuda"]),
    ),
) -> None:
    """List kernels, variants, dtypes, distributions, masks and score mods."""
    # Look for a device only if needed, since that loads torch, which takes seconds.
    if (support or device == "cuda") and device != "cpu":
        from attncheck.verify.environment import usable_device

        device = usable_device(device)
    catalogue = _catalogue()
    if support and device:
        from attncheck.subjects.capabilities import named_kernels

        subjects = {n: named_kernels.subject_named(n) for n in named_kernels.builtin_names()}
        supported = {name: _support(subject, device) for name, subject in subjects.items()}
        catalogue = {"device": device, **catalogue, "support": supported}
    with standard_output():
        if as_json:
            click.echo(json.dumps(catalogue, indent=2))
        else:
            _echo(catalogue)


def _echo(catalogue: dict[str, Any]) -> None:
    for title, entries in catalogue.items():
        if entries and title not in {"support", "device"}:
            click.echo(f"{title}:")
            width = max(map(len, entries))
            for name, summary in entries.items():
                click.echo(f"  {name:<{width}}  {summary}")
            click.echo()
    if "support" in catalogue:
        click.echo(f"what supports what on {catalogue['device']} (variants at the default shape):")
        _echo_support(catalogue["support"])
    else:
        click.echo("What supports what on this device: attncheck list --support")


def _catalogue() -> dict[str, Any]:
    from attncheck.cases.variants import OPTIONAL_VARIANTS, VARIANTS
    from attncheck.inputs.distributions import DISTRIBUTIONS
    from attncheck.mods.masks import MASKS
    from attncheck.mods.scores import SCORES
    from attncheck.subjects.capabilities.named_kernels import BUILTIN

    dtypes = {
        d.name: f"{d.storage.name} stored, {d.products.name} products, {d.output.name} out"
        + (", a descale per batch and key head" if d.scaled else "")
        for d in DTYPES.values()
        if d.measured
    }
    return {
        # From the table instead of the classes, which import torch.
        "kernels": {name: kernel.summary for name, kernel in BUILTIN.items()},
        **_kernels_of_others(),
        "variants": {name: v.summary for name, v in (VARIANTS | OPTIONAL_VARIANTS).items()},
        "dtypes": dtypes,
        "distributions": {name: d.summary for name, d in DISTRIBUTIONS.items()},
        "masks": {name: e.summary for name, e in MASKS.items()},
        "score mods": {name: e.summary for name, e in SCORES.items()},
    }


def _kernels_of_others() -> dict[str, dict[str, str]]:
    """Return kernels of the configuration and of installed packages, without importing any."""
    from attncheck.subjects.capabilities import configuration

    project = configuration.read_configuration()
    points = configuration.entry_points()
    return {
        "configured kernels": {
            name: f"{table.entry} ({table.convention or 'any'} convention)"
            for name, table in project.kernels.items()
        },
        "kernels of packages": {
            name: " and ".join(point.value for point in several) for name, several in points.items()
        },
    }


def _support(subject: Any, device: str) -> dict[str, Any]:
    """Return for each dtype and variant True if it is supported, else the reason."""
    from attncheck.cases.variants import ALL, DEFAULT_SHAPES, plan_cells

    why = subject.absent(device)
    if why:
        return {"absent": why}
    support: dict[str, Any] = {}
    for dtype in MEASURED_DTYPES:
        cells = plan_cells(
            dtypes=[dtype],
            variants=[ALL],
            shapes=[DEFAULT_SHAPES[device]],
            distributions=["normal"],
            seed=0,
        )
        support[dtype] = {}
        for cell in cells:
            # Leave out operations that a kernel is not for, such as softmax.
            if subject.concerns(cell.problem):
                reason = subject.unsupported(cell.problem, device)
                support[dtype][f"{cell.variant} {_arrangement(cell.problem)}"] = reason or True
    return {dtype: supported for dtype, supported in support.items() if supported}


def _arrangement(problem: Any) -> str:
    """Return MHA or GQA, or "rows" for a softmax, which shares no heads."""
    if problem.operation == "softmax":
        return "rows"
    return "MHA" if problem.group == 1 else "GQA"


def _echo_support(support: dict[str, dict[str, Any]]) -> None:
    width = max(map(len, support))
    for name, dtypes in support.items():
        # One line for all dtypes, since the reason is the same in each.
        if "absent" in dtypes:
            click.echo(f"  {name:<{width}}  nothing: {dtypes['absent']}")
            continue
        for dtype, cells in dtypes.items():
            click.echo(f"  {name:<{width}}  {dtype}: {_supported_text(cells)}")


def _supported_text(cells: dict[str, Any]) -> str:
    supported = [cell for cell, answer in cells.items() if answer is True]
    if len(supported) == len(cells):
        return "all"
    if not supported:
        return f"nothing: {next(iter(cells.values()))}"
    words = []
    for variant in dict.fromkeys(cell.split()[0] for cell in cells):
        heads = [c.split()[1] for c in supported if c.split()[0] == variant]
        all_heads = [c.split()[1] for c in cells if c.split()[0] == variant]
        if heads:
            # Name the heads only if a kernel supports just one arrangement.
            words.append(variant if heads == all_heads else f"{variant} ({', '.join(heads)})")
    return ", ".join(words)

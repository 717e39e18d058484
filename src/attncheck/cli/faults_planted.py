"""``attncheck faults``: the gate, scored on faults of the catalogue or of somebody's file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncheck.cli.faults_run import exit_code, header, ran
from attncheck.cli.faults_shown import show
from attncheck.cli.gate_asked import lanes_of
from attncheck.cli.standard_output import standard_output

if TYPE_CHECKING:
    from attncheck.cli.faults_options import FaultsAsked
    from attncheck.cli.interrupts import Interrupts
    from attncheck.faults.fault_selection import FaultSelection

__all__ = ["listed", "planted", "where"]


def planted(interrupts: Interrupts, asked: FaultsAsked) -> int:
    """Scores what is chosen, writes and shows the report; returns the exit code.

    Raises:
        UsageError: for what is not known, or says nothing together.
    """
    from attncheck.faults.score_report import fault_report
    from attncheck.reporting import fault_pages

    device, tier = where(asked)
    file = Path(asked.file).absolute() if asked.file else None
    these, typed = _chosen(asked, file, device, tier), asked.typed
    head = header(these, device=device, tier=tier, file=file, typed=typed)
    ended, content = ran(
        asked,
        these.units,
        head,
        work="attncheck.faults.scoring:work",
        options={"file": head["file"]},
        lanes=lanes_of(asked.jobs, device),
    )
    found = fault_report(content, these, command=typed)
    show(interrupts, found, asked.outputs, fault_pages)
    return exit_code(ended, fault_pages.exit_code(found))


def listed(asked: FaultsAsked) -> int:
    """Shows what is chosen, and runs nothing; returns the exit code."""
    from attncheck.faults.catalogue import CONTROLS, FAULTS

    device, tier = where(asked)
    these = _chosen(asked, Path(asked.file).absolute() if asked.file else None, device, tier)
    with standard_output():
        for kernel in dict.fromkeys(kernel.rpartition("@")[0] for kernel in these.names):
            one: Any = FAULTS.get(kernel) or CONTROLS.get(kernel)
            places = " and ".join(one.hosts) or "nowhere" if one else "file"
            category = FAULTS[kernel].category if kernel in FAULTS else "control" if one else "own"
            click.echo(f"{kernel} ({category}; {places}): {one.summary if one else kernel}")
    return 0


def where(asked: FaultsAsked) -> tuple[str, str]:
    """Device and tier, also where nobody says; raises UsageError for what is not there."""
    from attncheck.cases.tier import default_tier, tier_named
    from attncheck.verify.environment import default_device, require_device

    device = asked.device or default_device()
    require_device(device)
    return device, tier_named(asked.tier or default_tier(device)).name


def _chosen(asked: FaultsAsked, file: Path | None, device: str, tier: str) -> FaultSelection:
    from attncheck.core.errors import UnknownName, UsageError
    from attncheck.faults.fault import HOSTS
    from attncheck.faults.fault_selection import select_faults, select_from_file
    from attncheck.verify.environment import prepare

    hosts = dict.fromkeys((*HOSTS, "all"))
    if asked.host not in hosts:
        raise UnknownName("host", asked.host, hosts)
    if file is not None:
        if asked.categories or asked.controls or asked.host != "all":
            raise UsageError(
                "--kernel-file brings faults of its own: leave --host, --category and --controls "
                "out."
            )
        prepare(device)  # whether Triton is interpreted is decided as the file is imported
        return select_from_file(file, names=asked.names, device=device, tier=tier)
    some = asked.names or asked.categories
    return select_faults(
        hosts=HOSTS if asked.host == "all" else (asked.host,),
        names=asked.names,
        categories=asked.categories,
        controls=not some if asked.controls is None else asked.controls,
        device=device,
        tier=tier,
    )

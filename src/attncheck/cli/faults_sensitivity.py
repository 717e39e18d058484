"""``attncheck faults --sensitivity``: how small a fault is still seen."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING

from attncheck.cli.faults_planted import where
from attncheck.cli.faults_shown import show
from attncheck.cli.progress import progress

if TYPE_CHECKING:
    from attncheck.cli.faults_options import FaultsAsked
    from attncheck.cli.interrupts import Interrupts
    from attncheck.records.fault_scores import FaultSensitivity, SensitivityReport

__all__ = ["sensitive"]


def sensitive(interrupts: Interrupts, asked: FaultsAsked) -> int:
    """Measures, writes and shows the report; returns the exit code.

    Raises UnknownName for a fault, dtype or tier that there is not.
    """
    from attncheck.reporting import exit_codes

    device, tier = where(asked)
    seen = _measured(asked, tier=tier, device=device)
    show(interrupts, seen, asked.outputs)
    return exit_codes.exit_code(seen)


def _measured(asked: FaultsAsked, *, tier: str, device: str) -> SensitivityReport:
    """The smallest size of each continuous fault that is seen, in each dtype."""
    from attncheck.core.formats import DTYPES
    from attncheck.faults.continuous_faults import CONTINUOUS_FAULTS, continuous_fault_named
    from attncheck.gate.choices import Choices
    from attncheck.records.fault_scores import SensitivityReport

    faults = [continuous_fault_named(name).id for name in asked.names] or list(CONTINUOUS_FAULTS)
    every = [name for name, dtype in DTYPES.items() if dtype.measured]
    chosen = Choices.of({"tier": tier, "dtypes": ",".join(asked.dtypes or every)}).dtypes
    pairs = [(fault, dtype) for dtype in chosen for fault in faults]
    found: dict[tuple[str, str], FaultSensitivity] = {}
    workers = min(asked.jobs or _cores(device), len(pairs))
    spawn = multiprocessing.get_context("spawn")
    with (
        progress(len(pairs), quiet=asked.quiet) as advance,
        ProcessPoolExecutor(workers, mp_context=spawn) as pool,
    ):
        running = {pool.submit(_one, *each, tier, device): each for each in pairs}
        for done in as_completed(running):
            found[running[done]] = done.result()
            advance(" ".join(running[done]))
    return SensitivityReport(command=asked.typed, seen=tuple(found[each] for each in pairs))


def _one(fault: str, dtype: str, tier: str, device: str) -> FaultSensitivity:
    """One piece of work, in a process of its own."""
    from attncheck.faults.sensitivity import measure_sensitivity

    return measure_sensitivity(fault, dtype, tier=tier, device=device)


def _cores(device: str) -> int:
    if device != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

"""``attncheck faults --pytest``: somebody's own tests, with faulty kernels for their function."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from attncheck.cli.faults_run import exit_code, ran
from attncheck.cli.faults_shown import show
from attncheck.core.errors import UsageError

if TYPE_CHECKING:
    from attncheck.cli.faults_options import FaultsAsked
    from attncheck.cli.interrupts import Interrupts
    from attncheck.faults.fault import HostName
    from attncheck.faults.fault_selection import FaultSelection
    from attncheck.faults.user_suite import UserSuite
    from attncheck.records.fault_scores import OwnTestsReport
    from attncheck.workers.journal_format import JournalContent

__all__ = ["header", "own"]

_MOST_RUNS = 4  # of pytest at a time, unless somebody asks for more


def own(interrupts: Interrupts, asked: FaultsAsked) -> int:
    """Scores the tests, writes and shows the report; returns the exit code.

    Raises:
        UsageError: where no function is named, or the suite cannot be scored.
        UnknownName: for a fault or category that there is not.
    """
    from attncheck.faults.user_suite import UserSuite, check_scorable
    from attncheck.reporting import exit_codes
    from attncheck.workers.worker_pool import WorkerPlace

    assert asked.command is not None, "who calls this has one"
    if asked.replace is None:
        raise UsageError("--pytest needs --replace package.module:name, the function it tests.")
    suite = UserSuite(command=asked.command, replace=asked.replace, convention=asked.convention)
    host: HostName = "triton" if asked.host == "triton" else "ideal"
    these = _chosen(asked, host)
    names = [unit.kernel.rpartition("@")[0] for unit in these.units]
    ended, content = ran(
        asked,
        these.units,
        header(suite, these, typed=asked.typed),
        work="attncheck.faults.user_suite:suite_work",
        options={
            "command": suite.command,
            "replace": suite.replace,
            "convention": suite.convention,
            "folder": str(suite.folder),
        },
        lanes=[WorkerPlace()] * (asked.jobs or _cores()),
        check=lambda: check_scorable(suite, names, host),
    )
    found = _report(content, these, suite, command=asked.typed)
    show(interrupts, found, asked.outputs)
    return exit_code(ended, exit_codes.exit_code(found))


def header(suite: UserSuite, these: FaultSelection, *, typed: str) -> dict[str, Any]:
    """What the journal begins with: what makes two runs the same, and when the first began."""
    from attncheck.faults.fault_selection import source_digest
    from attncheck.faults.user_suite import project_digest

    return {
        "pytest": suite.command,
        "replace": suite.replace,
        "convention": suite.convention,
        "folder": str(suite.folder),
        "faults": list(these.names),
        "sources": f"{source_digest(None)} {project_digest(suite)}",
        "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "typed": typed,
    }


def _chosen(asked: FaultsAsked, host: HostName) -> FaultSelection:
    from attncheck.faults.fault_selection import select_faults

    these = select_faults(
        hosts=(host,),
        names=asked.names,
        categories=asked.categories,
        controls=False,
        device="cuda",  # what a fault needs is for the suite to have: nothing is left out
        tier="",
    )
    if not these.units:
        raise UsageError(f"none of these faults is planted in {host}: nothing is to be scored.")
    return these


def _report(
    content: JournalContent, these: FaultSelection, suite: UserSuite, *, command: str
) -> OwnTestsReport:
    """What the journal says of each fault, in the order of the catalogue."""
    from attncheck.faults.catalogue import fault_named
    from attncheck.records.fault_scores import OwnTestsReport, OwnTestsScore

    scores: list[OwnTestsScore] = []
    for unit in these.units:
        done = content.results.get(unit.id)
        if done is None:
            continue
        if "score" in done.facts:
            scores.append(msgspec.convert(done.facts["score"], OwnTestsScore))
            continue
        name, _, host = unit.kernel.rpartition("@")
        category = getattr(fault_named(name), "category", "control")
        status: Any = {"status": "not scored", "reason": done.harness}
        scores.append(OwnTestsScore(fault=name, category=category, host=host, **status))
    return OwnTestsReport(
        command=command,
        pytest=suite.command,
        replace=suite.replace,
        unfinished=len(these.units) - len(scores),
        unfinished_because=content.why,
        scores=tuple(scores),
    )


def _cores() -> int:
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(there, _MOST_RUNS)

"""What ``attncheck gate`` is to do, from its options: checked before anything is started."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.cli.gate_finish import typed
from attncheck.cli.gate_scripts import FAILURES
from attncheck.core.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from attncheck.gate.choices import Choices
    from attncheck.gate.sources import CommitTree
    from attncheck.records.baseline_entries import Baseline
    from attncheck.workers.journal_format import JournalContent
    from attncheck.workers.units import Unit
    from attncheck.workers.worker_pool import WorkerPlace

__all__ = ["JOURNAL", "Asked", "asked", "changed_only", "lanes_of", "seconds_of", "there"]

JOURNAL = "results.jsonl"
_OF_A_RUN = {"seed", "started", "typed"}  # of a journal's header: no part of the plan
_MOST_LANES = 4  # that are started unless somebody asks for more
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([smh]?)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One run of the gate.

    Attributes:
        kernels: As asked for.
        device, convention: Of all of them.
        choices: What is asked.
        shard: ``2/4``; empty for the whole.
        head: What the journal begins with.
        units: The first work.
    """

    kernels: tuple[str, ...]
    device: str
    convention: str
    choices: Choices
    shard: str
    head: dict[str, Any]
    units: tuple[Unit, ...]


def changed_only(
    names: tuple[str, ...], ref: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kernels to ask, and those that have not changed since ``ref``."""
    kernels = _kernels_of(names)
    if ref is None:
        return kernels, ()
    from attncheck.gate.sources import changed_kernels

    found = changed_kernels(kernels, ref)
    return found, tuple(kernel for kernel in kernels if kernel not in found)


def asked(  # noqa: PLR0913  # one parameter per option
    kernels: tuple[str, ...],
    *,
    tier: str | None,
    device: str | None,
    dtypes: tuple[str, ...],
    convention: str,
    stages: tuple[str, ...],
    skipped: tuple[str, ...],
    seed: int | None,
    shard: str,
    timeout: float,
    isolated: bool,
    sanitizer: bool,
    tree: CommitTree | None,
    baseline: Baseline | None,
    directory: str,
    fresh: bool,
) -> Asked:
    """What is to be done; raises UsageError for what cannot be.

    With a baseline or a tree the stage baseline has to be part of it: something is to be compared.
    """
    if missing := [name for name in ("hypothesis", "pytest") if find_spec(name) is None]:
        raise UsageError(f"a gate needs {missing[0]}: pip install 'attncheck[properties]'.")
    from attncheck.cases.tier import default_tier, tier_named
    from attncheck.conventions.declarations import convention_named
    from attncheck.gate.choices import BaselineCases, Choices, parse_stages
    from attncheck.gate.gate_report import journal_header
    from attncheck.gate.plan import describe_units, replay_units
    from attncheck.gate.sources import source_fingerprint
    from attncheck.verify.environment import default_device, require_device
    from attncheck.workers.units import Shard

    if convention:
        convention_named(convention)
    part = str(Shard.parse(shard))
    device = device or default_device()
    require_device(device)
    chosen = tier_named(tier or default_tier(device))
    if part and chosen.random and seed is None:
        raise UsageError(
            f"--shard {part}: each run of tier {chosen.name} draws other numbers: "
            "give all parts the same --seed N."
        )
    options: dict[str, Any] = {
        "tier": chosen.name,
        "seed": seed or 0,
        "stages": ",".join(parse_stages(stages, skipped)),
        "dtypes": ",".join(dtypes),
        "isolated": isolated,
        "timeout": timeout,
        "failures": str(Path(FAILURES).absolute()),
        "sanitizer": sanitizer,
        "tree": tree.spelled() if tree else "",
        "held": BaselineCases.of(baseline).spelled() if baseline else "",
    }
    choices = Choices.of(options)
    _check_stages(choices, sanitizer=sanitizer, measures=bool(baseline or tree))

    sources = source_fingerprint(kernels, (directory, str(Path(FAILURES).parent)))

    def head_of(choices: Choices) -> dict[str, Any]:
        return journal_header(
            kernels,
            device=device,
            convention=convention,
            started=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            plan=choices.plan() | {"sources": sources},
            shard=part,
            typed=typed(kernels),
        )

    head = head_of(choices)
    if chosen.random and seed is None:
        seed = _seed_of(head, there(directory, fresh=fresh))
        choices = Choices.of(options | {"seed": seed})
        head["seed"] = seed
    units = describe_units(kernels, device=device, tier=chosen.name, convention=convention)
    if not part:  # else: what failed on this machine is unknown to the other parts
        units += replay_units(
            kernels,
            FAILURES,
            device=device,
            convention=convention,
            tier=chosen.name,
            stages=choices.stages,
            dtypes=choices.dtypes,
        )
    return Asked(
        kernels=kernels,
        device=device,
        convention=convention,
        choices=choices,
        shard=part,
        head=head,
        units=tuple(units),
    )


def _check_stages(choices: Choices, *, sanitizer: bool, measures: bool) -> None:
    """Raises UsageError where what an option needs is not part of the run: it would say nothing."""
    if measures and "baseline" not in choices.stages:
        raise UsageError(
            "--baseline and --against compare what the stage 'baseline' measures: it is left out."
        )
    if sanitizer and "memory" not in choices.stages:
        raise UsageError("--sanitizer is part of the stage 'memory': it is left out.")


def _kernels_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """The kernels: those typed, each once; else those that the project names.

    No kernel is imported.

    Raises:
        UsageError: where there is none, or a name that nobody knows.
    """
    from attncheck.capabilities.configuration import read_configuration
    from attncheck.subjects.load import is_reference, kernel_names

    if not words:
        named = tuple(read_configuration().kernels)
        if not named:
            raise UsageError(
                "no kernel is named: give one, or name yours in [tool.attncheck.kernels] "
                "(attncheck init)."
            )
        return named
    for kernel in words:
        file, colons, _ = kernel.partition("::")
        if colons and not Path(file).is_file():
            raise UsageError(f"kernel {kernel!r}: there is no file {file!r}.")
        if not is_reference(kernel) and kernel not in kernel_names():
            raise UnknownName("kernel", kernel, kernel_names())
    return tuple(dict.fromkeys(words))


def seconds_of(text: str | None, option: str) -> float | None:
    """Seconds of ``90``, ``90s``, ``10m`` or ``2h``; raises UsageError for anything else."""
    if text is None:
        return None
    found = _DURATION.fullmatch(text.strip().lower())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if seconds <= 0:
        raise UsageError(f"{option} {text!r} must be a time above 0, such as 90s, 10m or 2h.")
    return seconds


def lanes_of(jobs: int | None, device: str) -> list[WorkerPlace]:
    """Where units are done: on each GPU in turn, or on the CPU with a thread each."""
    from attncheck.workers.worker_pool import WorkerPlace

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if device == "cpu":
        return [WorkerPlace(threads=1)] * (jobs or min(cores, _MOST_LANES))
    gpus = _gpus()
    # A compiler works beside the GPU: several lanes of one GPU wait for it at the same time.
    count = jobs or max(1, min(cores // 2, _MOST_LANES * len(gpus)))
    return [WorkerPlace(gpu=gpus[number % len(gpus)], threads=1) for number in range(count)]


def _seed_of(head: dict[str, Any], journal: JournalContent | None) -> int:
    """Which draw: that of the journal where it is of the same plan, else another one."""
    if journal is not None:
        there = {k: v for k, v in journal.head.items() if k not in _OF_A_RUN}
        if there == {k: v for k, v in head.items() if k not in _OF_A_RUN}:
            return int(journal.head.get("seed", 0))
    return secrets.randbelow(10**6)


def there(directory: str, *, fresh: bool) -> JournalContent | None:
    """What the journal of a folder says; None where there is none, or it is to be forgotten."""
    from attncheck.workers.journal_format import JournalError, read_journal

    path = Path(directory) / JOURNAL
    if fresh or not path.exists():
        return None
    try:
        return read_journal(path)
    except JournalError:  # who opens it says what is wrong with it
        return None


def _gpus() -> list[str]:
    """Those that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        return [name.strip() for name in visible.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(max(1, torch.cuda.device_count()))]

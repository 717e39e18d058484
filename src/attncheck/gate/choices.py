"""Choices of a gate run: plain values that travel to any process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from attncheck.cases.tier import Tier, tier_named
from attncheck.core.errors import UsageError, require_known
from attncheck.core.formats import DTYPES
from attncheck.gate.other_commit import CommitTree
from attncheck.records.baseline_entries import baseline_text
from attncheck.records.run_reports import STAGES, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attncheck.records.baseline_entries import Baseline

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Options of a gate run, the same for each of its kernels."""

    tier: Tier
    stages: tuple[Stage, ...] = STAGES
    dtypes: tuple[str, ...] = ()  # only these; empty for all that a kernel takes
    seed: int = 0
    isolated: bool = True  # whether kernels run in processes of their own
    timeout: float = 0.0  # seconds that one call of a kernel may take; 0 for as many as is usual
    failures: str = ""  # folder in which failures are kept; empty for none
    sanitizer: bool = False  # whether a few problems are asked under compute-sanitizer
    # The files of another commit, whose kernels are measured too; None for none.
    tree: CommitTree | None = None
    held: BaselineCases | None = None  # what a baseline holds, and is asked again; None without one

    @classmethod
    def of(cls, options: Mapping[str, Value]) -> Choices:
        """Read what ``options`` wrote; raises UsageError for what it cannot have written."""
        return cls(
            tier=tier_named(str(options["tier"])),
            stages=parse_stages(_words(options.get("stages", ""))),
            dtypes=_dtypes(_words(options.get("dtypes", ""))),
            seed=int(options.get("seed", 0)),
            isolated=bool(options.get("isolated", True)),
            timeout=float(options.get("timeout", 0.0)),
            failures=str(options.get("failures", "")),
            sanitizer=bool(options.get("sanitizer", False)),
            tree=CommitTree.read(str(options["tree"])) if options.get("tree") else None,
            held=BaselineCases.read(str(options["held"])) if options.get("held") else None,
        )

    def options(self) -> dict[str, Value]:
        """Return the same for ``of``: words and numbers."""
        return {
            "tier": self.tier.name,
            "stages": ",".join(self.stages),
            "dtypes": ",".join(self.dtypes),
            "seed": self.seed,
            "isolated": self.isolated,
            "timeout": self.timeout,
            "failures": self.failures,
            "sanitizer": self.sanitizer,
            "tree": self.tree.spelled() if self.tree else "",
            "held": self.held.spelled() if self.held else "",
        }

    def plan(self) -> dict[str, Value]:
        """Return what of it makes two runs the same plan."""
        # Isolation, timeouts and folders change how a kernel is called, not what it is asked.
        same = ("tier", "stages", "dtypes", "seed")
        results = {name: value for name, value in self.options().items() if name in same}
        results |= {"sanitizer": True} if self.sanitizer else {}
        results |= {"baseline": self.held.digest} if self.held else {}
        return results | ({"against": self.tree.commit} if self.tree else {})


def parse_stages(names: Sequence[str], without: Sequence[str] = ()) -> tuple[Stage, ...]:
    """Return stages in their order; all where none is named.

    Raises:
        UnknownName: for one that there is not.
        UsageError: where none is left.
    """
    require_known("stage", (*names, *without), STAGES)
    # In the order of STAGES whatever was typed: units and reports are sorted by it.
    left = tuple(s for s in STAGES if (not names or s in names) and s not in without)
    if not left:
        raise UsageError("no stage is left: leave one of --stage and --skip out.")
    return left


def _dtypes(names: Sequence[str]) -> tuple[str, ...]:
    measured = [name for name, dtype in DTYPES.items() if dtype.measured]
    require_known("dtype", names, measured)
    # In the table's order, so that a plan does not depend on what was typed first.
    return tuple(name for name in measured if name in names)


def _words(value: Value) -> tuple[str, ...]:
    return cast("tuple[str, ...]", tuple(word for word in str(value).split(",") if word))


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineCases:
    """The cases of a baseline, which a gate asks again."""

    digest: str  # of the baseline: another one makes another plan
    # Kernel, architecture, variant and Case, each as JSON has it.
    cases: tuple[tuple[str, str, str, dict[str, Any]], ...]

    @classmethod
    def of(cls, baseline: Baseline) -> Self:
        """Return those of its entries that say what was asked."""
        return cls(
            digest=hashlib.sha256(baseline_text(baseline).encode()).hexdigest()[:16],
            cases=tuple(
                (e.kernel, e.device, e.variant, e.asked) for e in baseline.entries if e.asked
            ),
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what ``spelled`` wrote."""
        digest, cases = json.loads(text)
        return cls(digest=digest, cases=tuple(map(tuple, cases)))

    def spelled(self) -> str:
        """Return it as text, for another process; ``read`` reads it."""
        return json.dumps([self.digest, self.cases])

    def of_kernel(self, kernel: str, architecture: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield variant and Case of each that it holds of a kernel on an architecture."""
        for name, device, variant, case in self.cases:
            if (name, device) == (kernel, architecture):
                yield variant, case

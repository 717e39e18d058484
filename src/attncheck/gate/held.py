"""What a baseline holds of kernels: Cases that are asked again, whatever the plan is by now."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from attncheck.records.baseline_entries import baseline_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.baseline_entries import Baseline

__all__ = ["Held"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The Cases of a baseline.

    Attributes:
        digest: Of the baseline: another one makes another plan.
        cases: Kernel, architecture, variant and Case, each as JSON has it.
    """

    digest: str
    cases: tuple[tuple[str, str, str, dict[str, Any]], ...]

    @classmethod
    def of(cls, baseline: Baseline) -> Self:
        """Those of its entries that say what was asked."""
        return cls(
            digest=hashlib.sha256(baseline_text(baseline).encode()).hexdigest()[:16],
            cases=tuple(
                (e.kernel, e.device, e.variant, e.asked) for e in baseline.entries if e.asked
            ),
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """What ``spelled`` wrote."""
        digest, cases = json.loads(text)
        return cls(digest=digest, cases=tuple(map(tuple, cases)))

    def spelled(self) -> str:
        """As a word that travels to any process."""
        return json.dumps([self.digest, self.cases])

    def asked(self, kernel: str, architecture: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Variant and Case of each that it holds of a kernel on an architecture."""
        for name, device, variant, case in self.cases:
            if (name, device) == (kernel, architecture):
                yield variant, case

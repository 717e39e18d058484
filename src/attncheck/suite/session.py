"""What one pytest session asks of which kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from attncheck.core.formats import DTYPES
from attncheck.strategies.families import MASK_FAMILIES
from attncheck.suite.kernels import Kernel, configured_kernels, kernels, ready
from attncheck.suite.kinds import PLAIN, Kind
from attncheck.suite.launched import has_launches_for
from attncheck.suite.marks import SOFTMAX
from attncheck.suite.samples import NOT_CONCERNED, refusal
from attncheck.suite.under_test import UnderTest
from attncheck.verify.kernel_server import Compiling

if TYPE_CHECKING:
    from attncheck.suite.asking import Asked
    from attncheck.suite.options import Options

__all__ = ["Param", "Session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """Which part of the suite one test is: what stands in the brackets of its id.

    Attributes:
        kernel: The kernel.
        dtype: Empty where a test is about none.
        family: The mask family; empty as dtype.
        refused: Why the kernel takes no such problem; empty where it takes some.
    """

    kernel: Kernel
    dtype: str = ""
    family: str = ""
    refused: str = ""

    @property
    def id(self) -> str:
        """``triton-flash2-bf16-causal``."""
        return "-".join(part for part in (self.kernel.id, self.dtype, self.family) if part)


@dataclass(slots=False, kw_only=True)
class Session:
    """The kernels of a session, and what was asked of each.

    Attributes:
        options: What the command line asks for.
        compiling: The clock of what is compiled.
        untaken: Kernel → dtype that it takes not at all → why: no test is made of it.
        lost_by: The test that took the GPU from this process; empty where none did.
    """

    options: Options
    untaken: dict[str, dict[str, str]] = field(default_factory=dict)
    lost_by: str = ""
    compiling: Compiling = field(default_factory=Compiling)
    _refusals: dict[tuple[str, str, str, Kind], str] = field(default_factory=dict)
    _none_taken: dict[tuple[str, str], bool] = field(default_factory=dict)

    @cached_property
    def device(self) -> str:
        """``cpu`` or ``cuda``; this process is made ready for it."""
        return ready(self.options)

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those that are judged, in order."""
        return kernels(self.options, self.device)

    @cached_property
    def _named(self) -> tuple[Kernel, ...]:
        """Those of the project's configuration, where none was asked for."""
        return () if self.options.kernels else configured_kernels(self.device)

    def params(self, asked: Asked) -> list[Param]:
        """The tests that a property becomes, in order."""
        return [
            Param(kernel=kernel, dtype=dtype, family=family, refused=refused)
            for kernel in self.kernels
            if has_launches_for(kernel.subject, asked.questions)
            for dtype in self._dtypes(kernel, asked)
            for family in asked.families
            if (refused := self._refusal_of(asked, kernel, family, dtype)) != NOT_CONCERNED
        ]

    def plain_params(self) -> list[Param]:
        """One for each kernel: the tests of somebody's own file.

        Those that were asked for; else those that the project names; else the built-in ones.
        """
        return [Param(kernel=kernel) for kernel in self._named or self.kernels]

    def under_test(self, param: Param) -> UnderTest:
        """What a test gets."""
        self.compiling.listen()
        return UnderTest(
            param.kernel.name,
            param.kernel.subject,
            self.device,
            dtype=param.dtype,
            family=param.family,
            tier=self.options.tier,
            compiling=self.compiling,
        )

    def _dtypes(self, kernel: Kernel, asked: Asked) -> list[str]:
        """Those that are wanted and that the kernel takes somewhere in the suite."""
        wanted = [name for name, dtype in DTYPES.items() if dtype.measured]
        for only in (asked.dtypes, self.options.dtypes):
            wanted = [name for name in wanted if not only or name in only]
        return [dtype for dtype in wanted if not self._untaken(kernel, dtype)]

    def _untaken(self, kernel: Kernel, dtype: str) -> bool:
        """Whether the kernel takes no problem of this dtype; then the reason is kept."""
        key = (kernel.name, dtype)
        if key not in self._none_taken:  # every property asks
            self._none_taken[key] = self._takes_none(kernel, dtype)
        return self._none_taken[key]

    def _takes_none(self, kernel: Kernel, dtype: str) -> bool:
        families = (*MASK_FAMILIES, SOFTMAX)
        reasons = []
        for kind in (PLAIN, Kind(paged=True), Kind(sink=True), Kind(backward=True)):
            for family in families:
                refusal = self._refusal(kernel, family, dtype, kind)
                if not refusal:
                    return False
                reasons += [refusal] if refusal != NOT_CONCERNED else []
        if self.options.kernels and self.options.dtypes:  # somebody asked for exactly this
            reasons = reasons or [NOT_CONCERNED]
        if reasons:
            self.untaken.setdefault(kernel.name, {})[dtype] = reasons[0]
        return True

    def _refusal_of(self, asked: Asked, kernel: Kernel, family: str, dtype: str) -> str:
        """Why the kernel takes no such problem as the property asks."""
        return self._refusal(kernel, family, dtype, asked.kind)

    def _refusal(self, kernel: Kernel, family: str, dtype: str, kind: Kind) -> str:
        key = (kernel.name, family, dtype, kind)
        if key not in self._refusals:
            self._refusals[key] = refusal(kernel.subject, family, dtype, self.device, kind)
        return self._refusals[key]

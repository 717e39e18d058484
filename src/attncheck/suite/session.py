"""The kernels of a pytest session, and the parametrisation of tests by them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from attncheck.cases.check_cases import check_cases
from attncheck.cases.mask_samples import PLAIN_KIND, ProblemKind
from attncheck.core.errors import HostError, UsageError
from attncheck.core.formats import MEASURED_DTYPES
from attncheck.subjects.capabilities import named_kernels
from attncheck.subjects.capabilities.configuration import read_configuration
from attncheck.subjects.capabilities.subject import Subject
from attncheck.suite.kernel_support import NOT_APPLICABLE, KernelSupport, is_askable
from attncheck.suite.property_spec import PropertySpec
from attncheck.suite.pytest_options import MARK, Options, choose_gpu
from attncheck.suite.under_test import UnderTest
from attncheck.verify.claims import hold_to_claims
from attncheck.verify.environment import prepare, usable_device
from attncheck.verify.executor import InProcess
from attncheck.verify.isolated import Deadlines
from attncheck.verify.kernel_hosts import open_kernel
from attncheck.verify.kernel_server import Compiling

NO_KERNEL = "attncheck-asks-nothing"
"""Id of a property that concerns none of the kernels, which is removed after collection."""

_T = TypeVar("_T")
_KINDS = (PLAIN_KIND, ProblemKind(paged=True), ProblemKind(sink=True), ProblemKind(backward=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel to be tested."""

    name: str  # Name as given by the user.
    subject: Subject

    @property
    def id(self) -> str:
        """Name in the ids of tests: ``file.wide`` for ``some/file.py::wide``."""
        path, separator, function = self.name.rpartition("::")  # a ``::`` would cut the test's id
        return f"{Path(path).stem}.{function}" if separator else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """Parameters of one test, which are in the brackets of its id."""

    kernel: Kernel
    dtype: str = ""  # Empty for a test that is not a property.
    family: str = ""  # The mask family; empty for a test that is not a property.
    refused: str = ""  # Why the kernel takes no such problem; empty if it takes some.

    @property
    def id(self) -> str:
        """Id such as ``triton-flash2-bf16-causal``."""
        return "-".join(part for part in (self.kernel.id, self.dtype, self.family) if part)


@dataclass(slots=False, kw_only=True)
class Session:
    """The kernels of a session, and which problems they take."""

    options: Options  # Options of the command line.
    # Kernel → dtype that it does not take → why; there are no tests of these.
    untaken: dict[str, dict[str, str]] = field(default_factory=dict)
    lost_by: str = ""  # The test that made the GPU unusable for this process; empty for none.
    compiling: Compiling = field(default_factory=Compiling)  # Measures the time of compilations.
    _supports: dict[str, KernelSupport] = field(default_factory=dict)
    claims: dict[str, list[str]] = field(default_factory=dict)
    _hosts: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def device(self) -> str:
        """``cpu`` or ``cuda``, for which this process is prepared before any kernel is loaded.

        Raises:
            pytest.UsageError: if the device is not available.
        """
        # The GPU has to be chosen before CUDA is initialised.
        if self.options.device != "cpu":
            choose_gpu()
        try:
            device = usable_device(self.options.device)
        except UsageError as error:
            raise pytest.UsageError(f"--device: {error}") from None
        prepare(device)
        return device

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the command line; by default built-in ones that can run on the device.

        Raises:
            pytest.UsageError: if a kernel of the command line cannot be loaded or run here.
        """
        if self.options.kernels:
            return tuple(map(self._load_kernel, self.options.kernels))
        return tuple(
            Kernel(name=name, subject=subject)
            for name in named_kernels.builtin_names()
            if not InProcess().absence(subject := named_kernels.subject_named(name), self.device)
        )

    @cached_property
    def configured_kernels(self) -> tuple[Kernel, ...]:
        """The kernels in ``[tool.attncheck.kernels]`` of the working directory's project.

        Raises:
            pytest.UsageError: if the table cannot be read, or a kernel cannot be loaded or run.
        """
        try:
            names = read_configuration().kernels
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        return tuple(map(self._load_kernel, names))

    def plain_params(self) -> list[Param]:
        """Return a Param for each kernel, for tests that are not properties.

        The kernels are those of the command line, or else of the project, or else built-in ones.
        """
        own = () if self.options.kernels else self.configured_kernels
        return [Param(kernel=kernel) for kernel in own or self.kernels]

    def params(self, spec: PropertySpec) -> list[Param]:
        """Return the Params of a property's tests, in order."""
        wanted = list(MEASURED_DTYPES)
        for only in (spec.dtypes, self.options.dtypes):
            wanted = [name for name in wanted if not only or name in only]
        params = []
        for kernel in self.kernels:
            if not is_askable(kernel.subject, spec.questions):
                continue
            for dtype in wanted:
                if not self._takes(kernel, dtype):
                    continue
                for family in spec.families:
                    refused = self._support(kernel).refusal(family, dtype, spec.kind)
                    if refused != NOT_APPLICABLE:
                        params.append(
                            Param(kernel=kernel, dtype=dtype, family=family, refused=refused)
                        )
        return params

    def under_test(self, param: Param) -> UnderTest:
        """Return the value of the fixture ``kernel`` for a test."""
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

    def skip_without_gpu(self) -> None:
        """Skip the test if an earlier test made the GPU unusable."""
        if self.lost_by:
            pytest.skip(f"this process lost its GPU in {self.lost_by}: run again without that")

    def close(self) -> None:
        """End the processes of the kernels."""
        self._hosts.close()

    def _load_kernel(self, name: str) -> Kernel:
        isolated = False if self.options.in_process else None
        limits = Deadlines.of(self.options.timeout)
        try:
            with few_threads(self.device):  # a separate process uses this number too
                host = open_kernel(name, device=self.device, isolated=isolated, deadlines=limits)
        except UsageError as error:
            raise pytest.UsageError(f"--kernel: {error}") from None
        except HostError as error:
            raise pytest.UsageError(f"--kernel: {name}: as it was loaded, {error}") from None
        try:
            with few_threads(self.device):
                claims = hold_to_claims(
                    host, kernel=name, device=self.device, dtypes=self.options.dtypes
                )
        except HostError as error:
            host.close()
            raise pytest.UsageError(f"--kernel: {name}: as it was tried, {error}") from None
        if claims is not None and (lines := claims.lines()):
            self.claims[name] = lines
        self._hosts.callback(host.close)
        reason = host.executor.absence(host.subject, self.device)
        if reason:
            raise pytest.UsageError(f"--kernel: {name} cannot run on {self.device}: {reason}.")
        return Kernel(name=name, subject=host.subject)

    def _support(self, kernel: Kernel) -> KernelSupport:
        if kernel.name not in self._supports:
            self._supports[kernel.name] = KernelSupport(kernel.subject, self.device)
        return self._supports[kernel.name]

    def _takes(self, kernel: Kernel, dtype: str) -> bool:
        """Return whether the kernel takes some problem in a dtype; if not, record the reason."""
        reasons = self._support(kernel).refusals(dtype, _KINDS)
        if reasons is None:
            return True
        if self.options.kernels and self.options.dtypes:
            reasons = reasons or [NOT_APPLICABLE]  # the user has requested exactly this
        if reasons:
            self.untaken.setdefault(kernel.name, {})[dtype] = reasons[0]
        return False


def covering(asked: Mapping[_T, tuple[str, Param]]) -> set[_T]:
    """Return a small subset of the properties' tests that covers their parameters.

    ``asked`` maps each test to its property and Param. The subset covers every combination of a
    kernel with a property, of a kernel with a (dtype, family), and of a property with a dtype or
    with a family that occurs in ``asked``; only higher combinations may be missing.
    """
    pairs = {}
    for test, (name, param) in asked.items():
        kernel, dtype, family = param.kernel.name, param.dtype, param.family
        pairs[test] = {(name, kernel), (name, dtype), (name, "", family), (kernel, dtype, family)}
    # Ordered by a hash: unrelated to files, and the same in every process.
    tests = sorted(
        asked, key=lambda test: zlib.crc32(f"{asked[test][0]} {asked[test][1].id}".encode())
    )
    chosen: set[_T] = set()
    covered: set[tuple[str, ...]] = set()
    for least in (4, 3, 2, 1):  # first the tests with the most new combinations
        for test in tests:
            if len(pairs[test] - covered) >= least:
                chosen.add(test)
                covered |= pairs[test]
    return chosen


@contextmanager
def few_threads(device: str) -> Iterator[None]:
    """Limit torch to one thread on a CPU or in a pytest-xdist worker within the context.

    At these sizes several threads mostly wait for each other, and were ten times slower when other
    processes used the cores too. The number of threads is restored for other tests.
    """
    threads = torch.get_num_threads()
    if device == "cpu" or "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def parametrize_kernels(metafunc: pytest.Metafunc, session: Session) -> None:
    """Parametrise ``kernel`` by the Params of a property, or by the kernels."""
    marker = metafunc.definition.get_closest_marker(MARK)
    if marker is None:
        params = [pytest.param(each, id=each.id) for each in session.plain_params()]
        metafunc.parametrize("kernel", params, indirect=True, scope="session")
        return
    params = [
        pytest.param(
            each,
            id=each.id,
            marks=[pytest.mark.skip(reason=each.refused)] if each.refused else [],
        )
        for each in session.params(marker.args[0])
    ]
    # Module scope keeps the tests of a file together and in order.
    metafunc.parametrize(
        # An empty list would show as a skipped test; this test is removed after collection.
        "kernel",
        params or [pytest.param(None, id=NO_KERNEL)],
        indirect=True,
        scope="module",
    )


def parametrize_problems(metafunc: pytest.Metafunc, dtypes: Sequence[str]) -> None:
    """Parametrise ``problem`` by the named problems of ``attncheck check``."""
    params = [
        pytest.param(each.case.problem, id=each.name if len(dtypes) < 2 else f"{dtype}-{each.name}")
        for dtype in dtypes or ("bf16",)
        for each in check_cases(dtype)
        if each.case.question == "compare"
    ]
    metafunc.parametrize("problem", params, indirect=True, scope="session")

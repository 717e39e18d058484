"""The kernels of a pytest session: loaded once, made ready for their device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attncheck.capabilities import named_kernels
from attncheck.capabilities.configuration import read_configuration
from attncheck.core.errors import UsageError
from attncheck.subjects.load import load_subject
from attncheck.suite.workers import choose_gpu
from attncheck.verify.environment import default_device, prepare, require_device
from attncheck.verify.executor import InProcess

if TYPE_CHECKING:
    from attncheck.capabilities.subject import Subject
    from attncheck.suite.options import Options

__all__ = ["Kernel", "configured_kernels", "kernels", "ready"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One that is to be judged.

    Attributes:
        name: What it was asked for by.
        id: What tests' ids call it.
        subject: The kernel.
    """

    name: str
    id: str
    subject: Subject


def ready(options: Options) -> str:
    """Where kernels run, and this process made ready for it, before any is loaded.

    Raises:
        pytest.UsageError: for a device that is not here.
    """
    if options.device != "cpu":
        choose_gpu()
    try:
        if options.device:
            require_device(options.device)
    except UsageError as error:
        raise pytest.UsageError(f"--device: {error}") from None
    device = options.device or default_device()
    prepare(device)
    return device


def kernels(options: Options, device: str) -> tuple[Kernel, ...]:
    """Those that were asked for; by default the built-in ones that can run on ``device``.

    Raises:
        pytest.UsageError: for one that was asked for and cannot be loaded, or not run here.
    """
    if options.kernels:
        return tuple(_asked_for(name, device) for name in options.kernels)
    return tuple(
        Kernel(name=name, id=name, subject=subject)
        for name in named_kernels.builtin_names()
        if not InProcess().absence(subject := named_kernels.subject_named(name), device)
    )


def configured_kernels(device: str) -> tuple[Kernel, ...]:
    """Those of ``[tool.attncheck.kernels]`` of the working directory's project.

    Raises:
        pytest.UsageError: for a table that cannot be read, a kernel that cannot be loaded or run.
    """
    try:
        names = read_configuration().kernels
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    return tuple(_asked_for(name, device) for name in names)


def _asked_for(name: str, device: str) -> Kernel:
    try:
        subject = load_subject(name)
    except UsageError as error:
        raise pytest.UsageError(f"--kernel: {error}") from None
    reason = InProcess().absence(subject, device)
    if reason:
        raise pytest.UsageError(f"--kernel: {name} cannot run on {device}: {reason}.")
    return Kernel(name=name, id=_id(name), subject=subject)


def _id(name: str) -> str:
    """``wide`` of ``some/file.py`` is ``file.wide``: a ``::`` would cut the test's own id."""
    path, separator, function = name.rpartition("::")
    return f"{Path(path).stem}.{function}" if separator else name

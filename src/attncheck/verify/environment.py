"""The machine and versions that a Record was measured with."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from importlib.util import find_spec

from attncheck.core import VERSION
from attncheck.core.errors import UsageError
from attncheck.records.record import Environment


def default_device() -> str:
    """Return ``cuda`` if torch sees a GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def require_device(device: str) -> None:
    """Raise UsageError if ``device`` is ``cuda`` and torch sees no GPU."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        build = torch.version.cuda
        why = f"torch {torch.__version__} sees no GPU" if build else "this torch has no CUDA"
        raise UsageError(f"device 'cuda' is not here: {why}. Leave --device out to use the CPU.")


def usable_device(wanted: str | None) -> str:
    """Return ``wanted``, or else ``default_device()``; raise as ``require_device``."""
    device = wanted or default_device()
    require_device(device)
    return device


def prepare(device: str) -> None:
    """Make this process ready for kernels on ``device``: compiled on a GPU, else interpreted."""
    if find_spec("triton"):
        from attncheck.kernels.compilation import prepare_triton

        prepare_triton(device)


def repair_interpreter() -> None:
    """Run this process's Triton kernels in Triton's CPU interpreter, repaired.

    Triton's own computes bf16 and fp8 wrongly. ``check`` and the command line call this by
    themselves on a CPU; a test that calls a Triton kernel itself does it in ``conftest.py``, where
    the kernels run on a CPU. A second call does nothing.

    Raises:
        InterpreterUnavailable: if triton is missing, or was imported in compiled mode before.
    """
    from attncheck.kernels import interpreter

    interpreter.enable()


def has_stock_interpreter() -> bool:
    """Return whether this process interprets Triton kernels without the repairs."""
    # Triton imports that module where it decorates the first function that it interprets.
    if "triton.runtime.interpreter" not in sys.modules:
        return False
    from attncheck.kernels import interpreter

    return not interpreter.enabled()


def replacement_assembler(device: str) -> str | None:
    """Return the ptxas that replaces a faulty one for our kernels on ``device``; None if none."""
    if device == "cpu" or not find_spec("triton"):  # Nothing is assembled.
        return None
    from attncheck.kernels import compilation

    return compilation.replacement_assembler()


def environment(device: str) -> Environment:
    """Return the machine and versions of this process on ``device`` (``cpu`` or ``cuda``)."""
    # Imported here, because the command line imports this module at its start.
    import numpy as np
    import torch

    gpu = device == "cuda"
    return Environment(
        device=torch.cuda.get_device_name() if gpu else "cpu",
        capability=".".join(map(str, torch.cuda.get_device_capability())) if gpu else "",
        machine=platform.machine(),
        python=".".join(map(str, sys.version_info[:3])),
        torch=str(torch.__version__),
        # From its metadata, because importing it fixes whether kernels are interpreted.
        triton=package_version("triton"),
        numpy=np.__version__,
        attncheck=VERSION,
        cuda=(torch.version.cuda or "") if gpu else "",
        # Repairs change the results of interpreted kernels, so they are part of the environment.
        interpreter=_repairs(),
    )


def package_version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _repairs() -> tuple[str, ...]:
    if not find_spec("triton"):
        return ()
    from attncheck.kernels import interpreter

    return interpreter.repairs() if interpreter.enabled() else ()

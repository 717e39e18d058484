"""The typed command line, and the kernels that it names."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from attncheck.cli.standard_output import at_end
from attncheck.core.errors import UsageError
from attncheck.workers.process import KERNEL_SERVER, Died, HeldOutput, Worker

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.kernel_hosts import KernelHost

_SECONDS_TO_END = 5.0  # for a killed process to end, which a GPU driver may delay


def start_worker(
    kernel: str, *, in_process: bool, echo: bool | HeldOutput | None = None
) -> Worker | None:
    """Start the process of a kernel early, so that both processes import torch at the same time.

    Return None for a kernel without a process. The process ends with the verb at the latest, also
    on an error. By default its prints are held until then, lest they stand between the rows of a
    page, and shown unless the exit code is 0; ``echo`` shows them as they come, or holds them.
    """
    from attncheck.subjects.capabilities.named_kernels import BUILTIN

    if in_process or kernel in BUILTIN:
        return None
    if echo is None:
        echo = HeldOutput(kernel, "attncheck check ")
        at_end(echo.show)
    worker = Worker(KERNEL_SERVER, echo=echo)
    click.get_current_context().call_on_close(lambda: worker.kill(_SECONDS_TO_END))
    return worker


def start_compilers(kernels: Collection[str], device: str | None) -> list[Worker]:
    """Start processes that compile our kernels ahead (``compile_ahead.start_compilers``).

    They end with the verb at the latest; ``end_without_gpu`` ends them sooner.
    """
    from attncheck.verify import compile_ahead

    workers = compile_ahead.start_compilers(kernels, device)
    for worker in workers:
        click.get_current_context().call_on_close(partial(worker.kill, _SECONDS_TO_END))
    return workers


def end_without_gpu(compilers: Iterable[Worker], device: str) -> None:
    """End compiler processes, started before the device was known, if ``device`` is no GPU.

    Their imports take seconds, during which they would disturb measurements.
    """
    for worker in compilers if device == "cpu" else ():
        worker.kill(_SECONDS_TO_END)


def few_threads(*, small: bool) -> None:
    """Make threads wait idly, and numpy multiply in one thread; call it before importing them.

    Threads wait for each other many times in a question. If other processes, such as the kernel's,
    need the cores too, busy waiting costs up to twenty times the work.

    Args:
        small: Whether all problems are so small that torch is quickest in one thread too.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if small:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def typed_command(*, files: Collection[str] = (), arguments: Collection[str] = ()) -> str:
    """Return the typed command line for a report, without --out.

    Args:
        files: Options whose value is a file, or ``FILE.py::NAME``, and loses its folder.
        arguments: Arguments whose value is a file likewise.
    """
    # From argv, not from click, which would add defaults to the typed words.
    words = iter(sys.argv[1:])
    command = ["attncheck"]
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--out":
            # Leave --out out, since a report does not depend on its folder.
            value = value if equals else next(words, "")
        elif option in files:
            value = _without_folder(value if equals else next(words, ""))
            command += [f"{option}={value}"] if equals else [option, value]
        else:
            command.append(_without_folder(word) if word in arguments else word)
    return shlex.join(command)


def was_typed(name: str) -> bool:
    """Return whether the option of this parameter was typed, even with its default value."""
    source = click.get_current_context().get_parameter_source(name)
    # The value alone does not show this, since a default may be typed.
    return source is ParameterSource.COMMANDLINE


def _without_folder(text: str) -> str:
    """Return ``file.py::name`` for ``some/folder/file.py::name``."""
    path, separator, name = text.partition("::")
    return Path(path).name + separator + name if path else text


@contextmanager
def open_host(
    kernel: str, worker: Worker | None, *, device: str, **options: Any
) -> Iterator[KernelHost]:
    """Yield one kernel, as ``open_kernels`` does.

    Raise UsageError also if it cannot run here.
    """
    with open_kernels({kernel: worker}, device=device, **options) as hosts:
        host = hosts[kernel]
        if absent := host.executor.absence(host.subject, device):
            raise UsageError(f"kernel {kernel!r} cannot run on {device}: {absent}.")
        yield host


@contextmanager
def open_kernels(
    workers: Mapping[str, Worker | None],
    *,
    device: str,
    convention: str = "",
    in_process: bool = False,
    seconds: float | None = None,
    mods: Mapping[str, str] | None = None,
    died: dict[str, Died] | None = None,
) -> Iterator[dict[str, KernelHost]]:
    """Yield the kernels of ``workers`` by their names; their processes end after the block.

    Args:
        workers: The process that was started for each kernel (``start_worker``), or None.
        convention: See ``kernel_hosts.open_kernel``, also for ``mods``.
        seconds: Time limit of one call.
        died: Receives the errors of processes that died while loading; by default these raise.

    Raises:
        UsageError: if a kernel cannot be loaded (``subjects.load``), or two would have the same
            name in reports.
    """
    from attncheck.verify.isolated import Deadlines
    from attncheck.verify.kernel_hosts import open_kernel

    hosts: dict[str, KernelHost] = {}
    with ExitStack() as stack:
        for kernel, worker in workers.items():
            try:
                host = open_kernel(
                    kernel,
                    convention=convention,
                    device=device,
                    isolated=False if in_process else None,
                    deadlines=Deadlines.of(seconds),
                    worker=worker,
                    mods=mods,
                )
            except Died as error:
                if died is None:
                    raise UsageError(f"kernel {kernel!r}: as it was loaded, {error}") from None
                died[kernel] = error
                continue
            stack.callback(host.close)
            # Rows of a report are identified by this name.
            name = host.subject.name
            if any(each.subject.name == name for each in hosts.values()):
                raise UsageError(f"kernel {kernel!r}: another one is called {name!r} too.")
            hosts[kernel] = host
        yield hosts


def not_applicable(subject: Subject) -> str:
    """Return the error message for a named kernel to which no cell of the plan applies."""
    return (
        f"kernel {subject.name!r} is for other operations or dtypes than are asked for: "
        "see attncheck list."
    )

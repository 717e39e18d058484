"""What was typed, and the kernels that it names."""

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

from attncheck.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.kernel_hosts import KernelHost
    from attncheck.workers.process import Died, Worker

_SECONDS_TO_END = 5.0  # of a process that was killed, where a driver holds on to it


def start_worker(kernel: str, *, in_process: bool, echo: bool = True) -> Worker | None:
    """Start a process for a kernel that will have one, while this one imports torch too.

    It ends with the verb at the latest, also where that refuses what was typed. What it prints is
    shown, unless ``echo`` is false.
    """
    from attncheck.subjects.capabilities.named_kernels import BUILTIN
    from attncheck.workers.process import KERNEL_SERVER, Worker

    if in_process or kernel in BUILTIN:
        return None
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
    """End processes that were started before anybody knew that ``device`` is no GPU.

    They import for seconds, beside what is measured.
    """
    for worker in compilers if device == "cpu" else ():
        worker.kill(_SECONDS_TO_END)


def few_threads(*, small: bool) -> None:
    """Have threads wait idly, and numpy's products one; to be called before either is imported.

    They wait for each other many times a question, and where the kernel's process and this one, or
    others, want the cores too, waiting busily costs up to twenty times the work.

    Args:
        small: Whether all that is asked is so small that torch is quickest in one thread too.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if small:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def typed_command(*, files: Collection[str] = (), argument: str = "") -> str:
    """The command line for a report.

    Args:
        files: Options that take a file, or ``FILE.py::NAME``: the file is named without its folder.
        argument: A word that stands without an option and is a file likewise.
    """
    # From argv, not from click: a report says what was typed, not what defaults made of it.
    words = iter(sys.argv[1:])
    command = ["attncheck"]
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--out":
            # A report does not depend on the folder that it is written to.
            value = value if equals else next(words, "")
        elif option in files:
            value = _without_folder(value if equals else next(words, ""))
            command += [f"{option}={value}"] if equals else [option, value]
        else:
            command.append(_without_folder(word) if word == argument else word)
    return shlex.join(command)


def was_typed(name: str) -> bool:
    """Return whether the option of this parameter was typed, be it as its default."""
    source = click.get_current_context().get_parameter_source(name)
    # The value does not tell: a default may be typed.
    return source is ParameterSource.COMMANDLINE


def _without_folder(text: str) -> str:
    """``file.py::name`` of ``some/folder/file.py::name``."""
    path, separator, name = text.partition("::")
    return Path(path).name + separator + name if path else text


@contextmanager
def open_host(
    kernel: str, worker: Worker | None, *, device: str, **how: Any
) -> Iterator[KernelHost]:
    """Yield the one kernel that is asked, as ``open_kernels`` does.

    Raises UsageError also where it cannot run here.
    """
    with open_kernels({kernel: worker}, device=device, **how) as hosts:
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
    """Yield by their names the kernels of ``workers``; processes of their own end with it.

    Args:
        workers: Of each kernel the process that was started for it (``start_worker``).
        convention: As of ``kernel_hosts.open_kernel``, as are ``mods``.
        seconds: That one call may take.
        died: Where to put what a process died of as it loaded its kernel; by default that raises.

    Raises:
        UsageError: for one that cannot be (``subjects.load``), or two that reports would call the
            same.
    """
    from attncheck.verify.kernel_hosts import open_kernel
    from attncheck.verify.remote_kernel import Deadlines
    from attncheck.workers.process import Died

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
            # Rows of a report are told apart by this name.
            name = host.subject.name
            if any(each.subject.name == name for each in hosts.values()):
                raise UsageError(f"kernel {kernel!r}: another one is called {name!r} too.")
            hosts[kernel] = host
        yield hosts


def not_applicable(subject: Subject) -> str:
    """Return the error of naming a kernel that no cell of the plan concerns."""
    return (
        f"kernel {subject.name!r} is for other operations or dtypes than are asked for: "
        "see attncheck list."
    )

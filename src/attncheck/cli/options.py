"""What was typed, and the kernels that it names."""

from __future__ import annotations

import math
import shlex
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.workers.process import Worker

_SECONDS_TO_END = 5.0  # of a process that was killed, where a driver holds on to it


def start_worker(kernel: str, *, in_process: bool) -> Worker | None:
    """Start a process for a kernel that will have one, while this one imports torch too.

    It ends with the verb at the latest, also where that refuses what was typed.
    """
    from attncheck.subjects.capabilities.named_kernels import BUILTIN
    from attncheck.workers.process import KERNEL_SERVER, Worker

    if in_process or kernel in BUILTIN:
        return None
    worker = Worker(KERNEL_SERVER, echo=True)
    click.get_current_context().call_on_close(lambda: worker.kill(_SECONDS_TO_END))
    return worker


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


def _without_folder(text: str) -> str:
    """``file.py::name`` of ``some/folder/file.py::name``."""
    path, separator, name = text.partition("::")
    return Path(path).name + separator + name if path else text


@contextmanager
def open_kernels(
    workers: Mapping[str, Worker | None],
    *,
    device: str,
    in_process: bool = False,
    seconds: float = math.inf,
) -> Iterator[list[Subject]]:
    """Yield the kernels that are the keys of ``workers``; those of their own processes end with it.

    Args:
        workers: Of each kernel the process that was started for it (``start_worker``).
        seconds: That one call may take.

    Raises:
        UsageError: for one that cannot be (``subjects.load``) or whose process dies as it is
            loaded, or two that reports would call the same.
    """
    from attncheck.core.errors import UsageError
    from attncheck.verify.kernel_hosts import open_kernel
    from attncheck.verify.remote_kernel import Deadlines
    from attncheck.workers.process import Died

    by_name: dict[str, Subject] = {}
    with ExitStack() as stack:
        for kernel, worker in workers.items():
            try:
                host = open_kernel(
                    kernel,
                    device=device,
                    isolated=False if in_process else None,
                    deadlines=Deadlines.of(seconds),
                    worker=worker,
                )
            except Died as error:
                raise UsageError(f"kernel {kernel!r}: as it was loaded, {error}") from None
            stack.callback(host.close)
            # Rows of a report are told apart by this name.
            if host.subject.name in by_name:
                taken = host.subject.name
                raise UsageError(f"kernel {kernel!r}: another one is called {taken!r} too.")
            by_name[host.subject.name] = host.subject
        yield list(by_name.values())


def not_applicable(subject: Subject) -> str:
    """Return the error of naming a kernel that no cell of the plan concerns."""
    return (
        f"kernel {subject.name!r} is for other operations or dtypes than are asked for: "
        "see attncheck list."
    )

"""Planted faults: a kernel that harms its process in a way that the query length selects.

One kernel has all the faults, because a process serves many Cases: after each fault a right one.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from attncheck.core.outputs import Outputs
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

RIGHT = 2
_STARTED = Path("grandchild")  # in the working directory


class Lazy(torch.Tensor):
    """A tensor subclass, which could compute its values later."""


def raises(q, right):
    raise ValueError("planted\nand more")


def wrong_shape(q, right):
    return right[..., :-1]


def wrong_dtype(q, right):
    return right.double()


def wrong_device(q, right):
    return right.to("meta")


def lazy(q, right):
    return right.as_subclass(Lazy)


def alias(q, right):
    return q.copy_(right)


def alias_of_a_part(q, right):
    """Returns other elements of the input's storage: the output would change with the input."""
    storage = q.untyped_storage()
    before = storage.nbytes() // q.itemsize
    storage.resize_(2 * storage.nbytes())
    out = torch.tensor([], dtype=q.dtype).set_(storage, before, q.shape)
    return out.copy_(right)


def mutation(q, right):
    q.view(torch.uint8).view(-1)[0] ^= 1
    return right


def mutation_unseen(q, right):
    """Replaces the functions of torch and attncheck that would detect the mutation."""
    from attncheck.verify import executor, obligations

    torch.equal = lambda *_: True
    obligations._EQUAL = torch.equal
    executor.written_input = lambda *_: ""
    return mutation(q, right)


def patched(q, right):
    """Replaces torch's comparisons without a fault to hide: it passes rightly."""
    torch.equal = lambda *_: True
    torch.allclose = torch.equal
    return right


def wrong_and_patched(q, right):
    torch.equal = torch.allclose = lambda *_: True
    return right + 1


def starts_a_daemon(q, right):
    """Starts a daemon that leaves its session and parent, ignores SIGTERM, and holds every pipe it
    inherited."""
    code = (
        "import os, signal, time, pathlib\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path('grandchild.part').write_text(str(os.getpid()))\n"
        "os.rename('grandchild.part', 'grandchild')\n"
        "time.sleep(1000)"
    )
    subprocess.Popen([sys.executable, "-S", "-c", code])
    while not _STARTED.exists():
        time.sleep(0.01)


def daemon_and_hang(q, right):
    """Holds the GIL forever: no Python thread in the process can end it."""
    starts_a_daemon(q, right)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.PyDLL(None).pause()


def daemon_and_death(q, right):
    """Forks a daemon, which inherits every open descriptor, and dies."""
    if os.fork() == 0:
        os.setsid()
        _STARTED.write_text(str(os.getpid()))
        time.sleep(1000)
    while not _STARTED.exists() or not _STARTED.read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(q, right):
    ctypes.string_at(0)


def exits(q, right):
    os._exit(0)


def raises_memory_error(q, right):
    raise MemoryError


def sets_memory_limit(q, right):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    return right + bytearray(1 << 40)[0]


def allocates_too_much(q, right):
    return right + torch.empty(1 << 50)[0]


def prints(q, right):
    """Prints a hundred megabytes, also past Python's streams, with escape codes and fake frames."""
    line = b"\x1b[2J\x1b]0;planted\x07attncheck\x00\x01\nran\x00\x00" + b"x" * 65000 + b"\n"
    for _ in range(800):
        os.write(1, line)
        os.write(2, line)
    sys.stdout.write("{}" * 1000)
    return right


def writes_everywhere(q, right):
    """Writes to every pipe that it finds what looks like a frame, except for the key."""
    frame = b"attncheck\x00\x01\nran".ljust(26, b"\x00") + bytes(24)
    for each in list(Path("/proc/self/fd").iterdir()):
        if int(each.name) > 2:
            with contextlib.suppress(OSError):
                os.write(int(each.name), frame + bytes(64))
    return right


def interrupts(q, right):
    raise KeyboardInterrupt


def raises_long_message(q, right):
    raise ValueError("\N{PILE OF POO}" * (1 << 17))


def returns_gradients(q, right):
    """Returns gradients that were not requested, one of an unusual dtype."""
    return Outputs(right, dq=torch.ones_like(right), dsink=torch.ones(1 << 20).int())


FAULTS = dict(
    enumerate(
        (
            raises,
            wrong_shape,
            wrong_dtype,
            wrong_device,
            lazy,
            alias,
            alias_of_a_part,
            mutation,
            mutation_unseen,
            patched,
            wrong_and_patched,
            daemon_and_hang,
            daemon_and_death,
            segfault,
            exits,
            raises_memory_error,
            sets_memory_limit,
            allocates_too_much,
            prints,
            writes_everywhere,
            interrupts,
            raises_long_message,
            returns_gradients,
        ),
        start=RIGHT + 1,
    )
)


class Planted(Ideal):
    """Right except for the fault; its name is an HTML script and its summary a formula."""

    name, summary = "<script>alert(1)</script>", "=planted()"

    def prepare(self, inputs):
        call, fault = super().prepare(inputs), FAULTS.get(inputs.problem.query)

        def spoiled():
            right = call()
            result = right if fault is None else fault(inputs.q, right.out)
            return result if isinstance(result, Outputs) else Outputs(result, right.lse)

        return spoiled


class Launched(Ideal):
    """A kernel with two other launches, of which one gives other results."""

    name, summary = "launched", "two launches"

    def launches(self, problem, device):
        if problem.query == FAULT_IN_LAUNCHES:
            os.kill(os.getpid(), signal.SIGABRT)
        return {"small": Ideal(Tiling(block_query=16, block_kv=16)), "other": Other()}


class Other(Ideal):
    name, summary = "other", "gives twice as much"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def twice():
            outputs = call()
            outputs.out.mul_(2)
            return outputs

        return twice


FAULT_IN_LAUNCHES = 5

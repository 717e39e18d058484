"""Planted faults: kernels with right numbers that misuse memory or leave their process changed."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from attncheck.subjects.ideal import Ideal

NAN16 = 0x7E00


def end(tensor):
    """The first address after a contiguous tensor."""
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()


class Allocating(Ideal):
    """Right, with every output in memory that it allocates from torch; subclasses plant a fault in
    ``spoil``."""

    name = "planted-allocating"

    def spoil(self, inputs, outputs):
        """Plant the fault; return other outputs, or None to keep these."""

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def planted():
            copies = {}
            for name, right in call().tensors().items():
                copies[name] = torch.empty(right.shape, dtype=right.dtype)
                copies[name].copy_(right)
            outputs = replace(call(), **copies)
            return self.spoil(inputs, outputs) or outputs

        return planted


# Out-of-bounds writes.


class ByteAfter(Allocating):
    def spoil(self, inputs, outputs):
        ctypes.memset(end(outputs.out), 0x11, 1)


class ByteBefore(Allocating):
    def spoil(self, inputs, outputs):
        ctypes.memset(outputs.out.data_ptr() - 1, 0x11, 1)


class NanAfter(Allocating):
    def spoil(self, inputs, outputs):
        ctypes.c_uint16.from_address(end(outputs.lse)).value = NAN16


class SameAsThere(Allocating):
    """Writes the byte that its first call read there: in one of two runs nothing changes."""

    def __init__(self):
        super().__init__()
        self.first = None

    def spoil(self, inputs, outputs):
        byte = ctypes.c_uint8.from_address(end(outputs.out))
        self.first = byte.value if self.first is None else self.first
        byte.value = self.first


class FarAfter(Allocating):
    """Writes at the end of the next tile of 128 rows."""

    def spoil(self, inputs, outputs):
        row = outputs.out.shape[-1] * outputs.out.element_size()
        ctypes.memset(end(outputs.out) + 128 * row - 1, 0x11, 1)


class BeyondInput(Allocating):
    def spoil(self, inputs, outputs):
        ctypes.memset(end(inputs.k), 0x11, 1)


class BeforeWorkspace(Allocating):
    def spoil(self, inputs, outputs):
        workspace = torch.zeros(7, dtype=torch.int32)
        ctypes.memset(workspace.data_ptr() - 1, 0x11, 1)


# Unwritten outputs, and reads of unwritten memory.


class LastRow(Allocating):
    """Leaves the last row of out unwritten."""

    def spoil(self, inputs, outputs):
        out = torch.empty(outputs.out.shape, dtype=outputs.out.dtype)
        out[:, :, :-1] = outputs.out[:, :, :-1]
        return replace(outputs, out=out)


class LastRowByItself(Allocating):
    """Leaves the last row of out unwritten, in memory that C++ allocates."""

    def spoil(self, inputs, outputs):
        with _disable_current_modes():
            return LastRow.spoil(self, inputs, outputs)


class ByItself(Allocating):
    """Right, in memory that C++ allocates."""

    def spoil(self, inputs, outputs):
        with _disable_current_modes():
            return replace(outputs, out=outputs.out.clone())


class KeptOutput(Allocating):
    """Reuses the out of its first call, and never writes the last row again."""

    def __init__(self):
        super().__init__()
        self.kept = None

    def spoil(self, inputs, outputs):
        if self.kept is None:
            self.kept = outputs.out
        else:
            self.kept[:, :, :-1] = outputs.out[:, :, :-1]
        return replace(outputs, out=self.kept)


class NumpyOutput(Allocating):
    """Its out is allocated by numpy, not by torch."""

    def spoil(self, inputs, outputs):
        memory = np.empty(tuple(outputs.out.shape), np.float32)
        out = torch.from_numpy(memory).copy_(outputs.out)
        return replace(outputs, out=out)


class EmptyWorkspace(Allocating):
    """Adds to a workspace that it wrongly takes for zeros."""

    def spoil(self, inputs, outputs):
        workspace = torch.empty(64, dtype=torch.int32)
        return replace(outputs, lse=outputs.lse + (workspace[5:9] & 1).sum())


class Swallowing(Allocating):
    """Multiplies unwritten memory by 0: NaN if that memory held NaN."""

    def spoil(self, inputs, outputs):
        workspace = torch.empty((4096,), dtype=torch.float16).float()
        return replace(outputs, lse=outputs.lse + (0.0 * workspace).sum())


class EmptyUnused(Allocating):
    """Right: masks unwritten memory instead of multiplying it."""

    def spoil(self, inputs, outputs):
        workspace = torch.empty((4096,), dtype=torch.float16).float()
        seen = torch.arange(4096) < 0
        return replace(outputs, lse=outputs.lse + torch.where(seen, workspace, 0.0).sum())


# Changes of process state.

STATES = {
    "torch's random generator": lambda: torch.rand(3),
    "Python's random generator": random.random,
    "numpy's random generator": lambda: np.random.rand(2),  # noqa: NPY002  # the one for all
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the float32 matmul precision": lambda: torch.set_float32_matmul_precision("high"),
    "torch.backends.cuda.matmul.allow_tf32": lambda: setattr(
        torch.backends.cuda.matmul, "allow_tf32", True
    ),
    "torch.backends.cudnn.deterministic": lambda: setattr(
        torch.backends.cudnn, "deterministic", True
    ),
    "torch.backends.cuda.flash_sdp": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "the deterministic algorithms flag": lambda: torch.use_deterministic_algorithms(True),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "the number of torch's threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "whether denormals are flushed to 0": lambda: torch.set_flush_denormal(True),
    "the working directory": lambda: os.chdir("/"),
    "environment variables": lambda: os.environ.update(PLANTED="1"),
    "signal handlers": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "sys.path": lambda: sys.path.append("/planted"),
    "the recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
}


class Changing(Allocating):
    """Changes one part of its process's state in every call, or in its first call only."""

    def __init__(self, part, *, once=False):
        super().__init__()
        self.part, self.once, self.calls = part, once, 0

    def spoil(self, inputs, outputs):
        self.calls += 1
        if self.calls == 1 or not self.once:
            STATES[self.part]()


# Leaks.


class Keeping(Allocating):
    """Leaks one more resource in every call, up to ``most``."""

    def __init__(self, resource, most=10_000):
        super().__init__()
        self.resource, self.most, self.kept = resource, most, []

    def spoil(self, inputs, outputs):
        if len(self.kept) < self.most:
            self.kept.append(getattr(self, self.resource)(outputs))

    def descriptor(self, outputs):
        return os.open(os.devnull, os.O_RDONLY)

    def thread(self, outputs):
        leave = threading.Event()
        threading.Thread(target=leave.wait, daemon=True).start()
        return leave

    def child(self, outputs):
        return subprocess.Popen(["sleep", "60"])

    def tensor(self, outputs):
        return outputs.out

    def close(self):
        for one in self.kept:
            if self.resource == "descriptor":
                os.close(one)
            elif self.resource == "thread":
                one.set()
            elif self.resource == "child":
                one.kill()
                one.wait()

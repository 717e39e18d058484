"""Kernels with the right numbers that write, read, leave or keep what they must not."""

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
    """Right, with every output in memory that it asks torch for; then ``does`` what is planted."""

    name = "planted-allocating"

    def does(self, inputs, outputs):
        """What it does besides."""

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def planted():
            made = {}
            for name, right in call().tensors().items():
                made[name] = torch.empty(right.shape, dtype=right.dtype)
                made[name].copy_(right)
            outputs = replace(call(), **made)
            return self.does(inputs, outputs) or outputs

        return planted


# What a call writes.


class ByteAfter(Allocating):
    def does(self, inputs, outputs):
        ctypes.memset(end(outputs.out), 0x11, 1)


class ByteBefore(Allocating):
    def does(self, inputs, outputs):
        ctypes.memset(outputs.out.data_ptr() - 1, 0x11, 1)


class NanAfter(Allocating):
    def does(self, inputs, outputs):
        ctypes.c_uint16.from_address(end(outputs.lse)).value = NAN16


class SameAsThere(Allocating):
    """Writes what it found there in its first call: in one of two runs nothing changes."""

    def __init__(self):
        super().__init__()
        self.found = None

    def does(self, inputs, outputs):
        there = ctypes.c_uint8.from_address(end(outputs.out))
        self.found = there.value if self.found is None else self.found
        there.value = self.found


class FarAfter(Allocating):
    """The next tile of 128 rows."""

    def does(self, inputs, outputs):
        row = outputs.out.shape[-1] * outputs.out.element_size()
        ctypes.memset(end(outputs.out) + 128 * row - 1, 0x11, 1)


class BeyondInput(Allocating):
    def does(self, inputs, outputs):
        ctypes.memset(end(inputs.k), 0x11, 1)


class BeforeWorkspace(Allocating):
    def does(self, inputs, outputs):
        workspace = torch.zeros(7, dtype=torch.int32)
        ctypes.memset(workspace.data_ptr() - 1, 0x11, 1)


# What it leaves unwritten, or reads of what nobody wrote.


class LastRow(Allocating):
    def does(self, inputs, outputs):
        out = torch.empty(outputs.out.shape, dtype=outputs.out.dtype)
        out[:, :, :-1] = outputs.out[:, :, :-1]
        return replace(outputs, out=out)


class LastRowByItself(Allocating):
    """The same in memory that C++ allocates."""

    def does(self, inputs, outputs):
        with _disable_current_modes():
            return LastRow.does(self, inputs, outputs)


class ByItself(Allocating):
    """Right, in memory that C++ allocates."""

    def does(self, inputs, outputs):
        with _disable_current_modes():
            return replace(outputs, out=outputs.out.clone())


class KeptOutput(Allocating):
    """Its out lies where it lay in the call before, with the last row of its first call."""

    def __init__(self):
        super().__init__()
        self.kept = None

    def does(self, inputs, outputs):
        if self.kept is None:
            self.kept = outputs.out
        else:
            self.kept[:, :, :-1] = outputs.out[:, :, :-1]
        return replace(outputs, out=self.kept)


class NumpyOutput(Allocating):
    """Its out is numpy's, which does not ask torch for memory."""

    def does(self, inputs, outputs):
        made = np.empty(tuple(outputs.out.shape), np.float32)
        out = torch.from_numpy(made).copy_(outputs.out)
        return replace(outputs, out=out)


class EmptyWorkspace(Allocating):
    """Adds up in a workspace that it takes for zeros."""

    def does(self, inputs, outputs):
        workspace = torch.empty(64, dtype=torch.int32)
        return replace(outputs, lse=outputs.lse + (workspace[5:9] & 1).sum())


class Swallowing(Allocating):
    """Multiplies what nobody wrote by 0: NaN where that is no number."""

    def does(self, inputs, outputs):
        workspace = torch.empty((4096,), dtype=torch.float16).float()
        return replace(outputs, lse=outputs.lse + (0.0 * workspace).sum())


class EmptyUnused(Allocating):
    """Right: what nobody wrote is masked, and not multiplied."""

    def does(self, inputs, outputs):
        workspace = torch.empty((4096,), dtype=torch.float16).float()
        seen = torch.arange(4096) < 0
        return replace(outputs, lse=outputs.lse + torch.where(seen, workspace, 0.0).sum())


# What it leaves changed in its process.

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
    """Changes one part of its process with every call, or with its first alone."""

    def __init__(self, part, *, once=False):
        super().__init__()
        self.part, self.once, self.calls = part, once, 0

    def does(self, inputs, outputs):
        self.calls += 1
        if self.calls == 1 or not self.once:
            STATES[self.part]()


# What it keeps.


class Keeping(Allocating):
    """Keeps one more of something with every call, up to ``most``."""

    def __init__(self, what, most=10_000):
        super().__init__()
        self.what, self.most, self.kept = what, most, []

    def does(self, inputs, outputs):
        if len(self.kept) < self.most:
            self.kept.append(getattr(self, self.what)(outputs))

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
            if self.what == "descriptor":
                os.close(one)
            elif self.what == "thread":
                one.set()
            elif self.what == "child":
                one.kill()
                one.wait()

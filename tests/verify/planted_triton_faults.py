"""Planted faults in Triton kernels: at the last tile, in atomics and in the use of streams.

They run on a GPU or, where TRITON_INTERPRET is set before the import, in the interpreter.
"""

# ruff: noqa: N803  # Triton: constexprs in capitals

from dataclasses import replace

import torch
import triton
import triton.language as tl

from attncheck.subjects.ideal import Ideal

BLOCK = 64


@triton.jit
def copy_tile(source, target, size, BLOCK: tl.constexpr, STORED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size, other=1.0), mask=at < STORED)


@triton.jit
def sum_tile(source, target, size, BLOCK: tl.constexpr, LOADED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tl.load(source + at, mask=at < LOADED, other=0.0).to(tl.float32)
    total = tl.sum(there * tl.where(at < size, 1.0, 0.0))
    tl.store(target + tl.program_id(0), total)


@triton.jit
def add_tile(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(target, tl.sum(tl.load(source + at)))


class Copying(Ideal):
    """Right: its LSE is copied by a Triton kernel, tile by tile."""

    name = "planted-copying"

    def stored(self, size):
        """The number of elements to store."""
        return size

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def planted():
            outputs = call()
            return replace(outputs, lse=self.copy(outputs.lse))

        return planted

    def copy(self, right):
        made = torch.empty_like(right)
        size = right.numel()
        copy_tile[(triton.cdiv(size, BLOCK),)](right, made, size, BLOCK, self.stored(size))
        return made


class WholeTiles(Copying):
    """Stores its last tile in full, beyond the end of the output."""

    def stored(self, size):
        return triton.cdiv(size, BLOCK) * BLOCK


class FullTiles(Copying):
    """Leaves out the last tile, which is partial."""

    def stored(self, size):
        return size // BLOCK * BLOCK


class ReadsBeyond(Ideal):
    """Reads beyond the end of k, and multiplies what it read by 0."""

    name = "planted-reads-beyond"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def planted():
            outputs, size = call(), inputs.k.numel()
            tiles = triton.cdiv(size, 1024)
            sums = torch.empty(tiles, dtype=torch.float32, device=inputs.device)
            sum_tile[(tiles,)](inputs.k, sums, size, 1024, tiles * 1024)
            return replace(outputs, lse=outputs.lse + 0.0 * sums.sum())

        return planted


class Atomic(Ideal):
    """Adds to LSE an atomic sum of many numbers, whose order differs from call to call."""

    name = "planted-atomic"

    def prepare(self, inputs):
        call = super().prepare(inputs)
        numbers = torch.linspace(-1, 1, 1 << 20, device=inputs.device) ** 3

        def planted():
            total = torch.zeros(1, device=inputs.device)
            add_tile[(numbers.numel() // BLOCK,)](numbers, total, BLOCK)
            outputs = call()
            return replace(outputs, lse=outputs.lse + total)

        return planted


class OwnStream(Copying):
    """Copies on a stream of its own without synchronising before or after it."""

    before = after = False

    def copy(self, right):
        current, own = torch.cuda.current_stream(), torch.cuda.Stream()
        made = torch.empty_like(right)
        if self.before:
            own.wait_stream(current)
        with torch.cuda.stream(own):
            size = right.numel()
            for _ in range(50):  # slow enough for the output to be read too early
                copy_tile[(triton.cdiv(size, BLOCK),)](right, made, size, BLOCK, size)
        if self.after:
            current.wait_stream(own)
        return made


class OwnStreamNotWaitedFor(OwnStream):
    before = True


class OwnStreamDoesNotWait(OwnStream):
    after = True


class OwnStreamKept(OwnStreamNotWaitedFor):
    """Uses the same stream in every call, and does not wait for it."""

    def __init__(self):
        super().__init__()
        self.kept = torch.cuda.Stream()

    def copy(self, right):
        torch.cuda.synchronize()  # waiting before the copy does not help
        made = torch.empty_like(right)
        self.kept.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.kept):
            made.copy_(right)
        return made


class AllOnOwnStream(Ideal):
    """Runs the whole kernel on a stream of its own without synchronising before or after it."""

    name = "planted-all-on-own-stream"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def planted():
            with torch.cuda.stream(torch.cuda.Stream()):
                return call()

        return planted


class OwnStreamJoined(OwnStream):
    """Right: the streams wait for each other."""

    before = after = True

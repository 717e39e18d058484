"""Triton kernels that copy the right result, and what goes wrong at their last tile or stream.

They run in the interpreter and on a GPU: whoever imports this has made Triton ready.
"""

# ruff: noqa: N803  # Triton: constexprs in capitals

from dataclasses import replace

import torch
import triton
import triton.language as tl

from attncheck.subjects.ideal import Ideal

BLOCK = 64


@triton.jit
def copied(source, target, size, BLOCK: tl.constexpr, STORED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size, other=1.0), mask=at < STORED)


@triton.jit
def summed(source, target, size, BLOCK: tl.constexpr, LOADED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tl.load(source + at, mask=at < LOADED, other=0.0).to(tl.float32)
    total = tl.sum(there * tl.where(at < size, 1.0, 0.0))
    tl.store(target + tl.program_id(0), total)


@triton.jit
def added(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(target, tl.sum(tl.load(source + at)))


class Copying(Ideal):
    """Its LSE is written by a kernel, tile by tile."""

    name = "planted-copying"

    def stored(self, size):
        """How many elements are stored."""
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
        copied[(triton.cdiv(size, BLOCK),)](right, made, size, BLOCK, self.stored(size))
        return made


class WholeTiles(Copying):
    """Its last tile is stored in full."""

    def stored(self, size):
        return triton.cdiv(size, BLOCK) * BLOCK


class FullTiles(Copying):
    """Its last tile, which is not full, is not stored."""

    def stored(self, size):
        return size // BLOCK * BLOCK


class ReadsBeyond(Ideal):
    """Multiplies what lies after k by 0, and adds it up."""

    name = "planted-reads-beyond"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def planted():
            outputs, size = call(), inputs.k.numel()
            tiles = triton.cdiv(size, 1024)
            sums = torch.empty(tiles, dtype=torch.float32, device=inputs.device)
            summed[(tiles,)](inputs.k, sums, size, 1024, tiles * 1024)
            return replace(outputs, lse=outputs.lse + 0.0 * sums.sum())

        return planted


class Atomic(Ideal):
    """LSE plus a sum of many numbers, in whatever order the blocks of a GPU come."""

    name = "planted-atomic"

    def prepare(self, inputs):
        call = super().prepare(inputs)
        numbers = torch.linspace(-1, 1, 1 << 20, device=inputs.device) ** 3

        def planted():
            total = torch.zeros(1, device=inputs.device)
            added[(numbers.numel() // BLOCK,)](numbers, total, BLOCK)
            outputs = call()
            return replace(outputs, lse=outputs.lse + total)

        return planted


class OwnStream(Copying):
    """Copies on a stream of its own, which waits for nobody and for which nobody waits."""

    before = after = False

    def copy(self, right):
        current, own = torch.cuda.current_stream(), torch.cuda.Stream()
        made = torch.empty_like(right)
        if self.before:
            own.wait_stream(current)
        with torch.cuda.stream(own):
            size = right.numel()
            for _ in range(50):  # long enough to be read before it has ended
                copied[(triton.cdiv(size, BLOCK),)](right, made, size, BLOCK, size)
        if self.after:
            current.wait_stream(own)
        return made


class OwnStreamNotWaitedFor(OwnStream):
    before = True


class OwnStreamDoesNotWait(OwnStream):
    after = True


class OwnStreamKept(OwnStreamNotWaitedFor):
    """The same one in every call."""

    def __init__(self):
        super().__init__()
        self.kept = torch.cuda.Stream()

    def copy(self, right):
        torch.cuda.synchronize()  # however often it waits before
        made = torch.empty_like(right)
        self.kept.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.kept):
            made.copy_(right)
        return made


class AllOnOwnStream(Ideal):
    """All of it on a stream of its own, with whatever synchronises within, and no waiting."""

    name = "planted-all-on-own-stream"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def planted():
            with torch.cuda.stream(torch.cuda.Stream()):
                return call()

        return planted


class OwnStreamJoined(OwnStream):
    """Right: each waits for the other."""

    before = after = True

"""Kernels whose bits depend on what is no part of their inputs."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from attncheck.subjects.ideal import Ideal


def moved(outputs, steps=1):
    """LSE as many ulps further."""
    lse = outputs.lse
    for _ in range(steps):
        lse = torch.nextafter(lse, torch.full_like(lse, 1e9))
    return replace(outputs, lse=lse)


class Spoiled(Ideal):
    """Right, and moved by as many ulps as ``steps`` says of this call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def bit_steps(self, inputs):
        """How far this call's LSE is moved."""

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def spoiled():
            self.calls += 1
            return moved(call(), self.bit_steps(inputs))

        return spoiled


class AnyOrder(Spoiled):
    """As atomics, which add up in whatever order: some calls round otherwise."""

    def __init__(self):
        super().__init__()
        self.order = random.Random(1)  # noqa: S311  # an order, and no secret

    def bit_steps(self, inputs):
        return self.order.randrange(3)


class AnyOrderUnpromised(AnyOrder):
    promises = frozenset()


class WrongUnpromised(AnyOrderUnpromised):
    def bit_steps(self, inputs):
        return 100_000 * (self.calls % 2)


class WrongElsewhereUnpromised(AnyOrderUnpromised):
    """Right where it was prepared first."""

    def __init__(self):
        super().__init__()
        self.prepared = 0

    def prepare(self, inputs):
        self.prepared += 1
        return super().prepare(inputs)

    def bit_steps(self, inputs):
        return 100_000 * (self.prepared % 2 == 0)


class FirstCall(Spoiled):
    """Right in its first call alone."""

    def bit_steps(self, inputs):
        return int(self.calls > 1)


class ByAddress(Spoiled):
    """Other vectors where its keys begin elsewhere."""

    def __init__(self):
        super().__init__()
        self.first = None

    def bit_steps(self, inputs):
        self.first = self.first or inputs.k.data_ptr()
        return int(inputs.k.data_ptr() != self.first)


class ByThreads(Spoiled):
    def bit_steps(self, inputs):
        return torch.get_num_threads() - 1


class AnyGradients(Ideal):
    """Its dq is added up in another order in every second call."""

    def prepare(self, inputs):
        call = super().prepare(inputs)
        calls = iter(range(1_000))

        def spoiled():
            outputs = call()
            further = torch.full_like(outputs.dq.float(), 2.0 ** (next(calls) % 2))
            return replace(outputs, dq=(outputs.dq.float() * further).to(outputs.dq.dtype))

        return spoiled


class AnyGradientsUnpromised(AnyGradients):
    promises_gradients = False


class ByPlace(Ideal):
    """Its first sequence has another order of sums than the others."""

    promises = frozenset({"repeat", "batch"})

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def spoiled():
            outputs = call()
            return replace(outputs, lse=torch.cat([moved(outputs).lse[:1], outputs.lse[1:]]))

        return spoiled


class ByNeighbours(Ideal):
    """A sequence that is not alone is rounded by what the others hold."""

    promises = frozenset({"repeat", "batch"})

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def spoiled():
            outputs = call()
            return moved(outputs) if len(inputs.q) > 1 else outputs

        return spoiled


class ReadsNeighbours(Ideal):
    """Promises nothing, and is wrong by far more than rounding where it is not alone."""

    promises = frozenset()

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def spoiled():
            outputs = call()
            return replace(outputs, lse=outputs.lse + 0.5 * (len(inputs.q) > 1))

        return spoiled


class WrongSplits(Ideal):
    """Right as it launches itself; its other launch loses a split."""

    def launches(self, problem, device):
        return {"splits": _Lost()}


class _Lost(Ideal):
    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: replace(call(), lse=call().lse - 0.5)

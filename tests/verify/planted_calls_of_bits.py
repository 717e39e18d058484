"""Kernels whose bits depend on what is no part of their inputs."""

import random
from dataclasses import replace
from itertools import count

import torch
from tests.planted_kernels.outputs_given import another_last_bit, in_turns, spoiled

NOTHING = frozenset()
BATCH = frozenset({"repeat", "batch"})


def moving(steps, **promises):
    """Right, with LSE as many ulps further as ``steps(number of the call, inputs)`` says."""
    numbers = count(1)

    def moved(inputs, right):
        lse, last = right.lse, torch.full_like(right.lse, 1e9)
        for _ in range(int(steps(next(numbers), inputs))):
            lse = torch.nextafter(lse, last)
        return replace(right, lse=lse)

    return spoiled(moved, **promises)


def any_order(**promises):
    """As atomics, which add up in whatever order: some calls round otherwise."""
    order = random.Random(1)  # noqa: S311  # an order, and no secret
    return moving(lambda *_: order.randrange(3), **promises)


def wrong_elsewhere():
    """Right where it was prepared first."""
    prepared = []
    kernel = moving(lambda *_: 100_000 * (len(prepared) % 2 == 0), promises=NOTHING)
    right = kernel.prepare

    def prepare(inputs):
        prepared.append(inputs)
        return right(inputs)

    kernel.prepare = prepare
    return kernel


def by_address():
    """Other vectors where its keys begin elsewhere."""
    first = []

    def steps(_, inputs):
        first.append(inputs.k.data_ptr())
        return first[-1] != first[0]

    return moving(steps)


def any_gradients(**promises):
    """Its dq is added up in another order in every second call."""

    def change(right, number):
        further = torch.full_like(right.dq.float(), 2.0 ** ((number - 1) % 2))
        return replace(right, dq=(right.dq.float() * further).to(right.dq.dtype))

    return spoiled(in_turns(change), **promises)


def by_place():
    """Its first sequence has another order of sums than the others."""

    def change(_, right):
        lse = right.lse.clone()
        lse[0] = another_last_bit(lse[0])
        return replace(right, lse=lse)

    return spoiled(change, promises=BATCH)


def reads_neighbours():
    """Promises nothing, and is wrong by far more than rounding where it is not alone."""

    def change(inputs, right):
        return replace(right, lse=right.lse + 0.5 * (len(inputs.q) > 1))

    return spoiled(change, promises=NOTHING)


def wrong_splits():
    """Right as it launches itself; its other launch loses a split."""
    lost = spoiled(lambda _, right: replace(right, lse=right.lse - 0.5))
    return spoiled(lambda *_: None, launches=lambda *_: {"splits": lost})


KERNELS = {
    "AnyOrder": any_order,
    "AnyOrderUnpromised": lambda: any_order(promises=NOTHING),
    "WrongUnpromised": lambda: moving(lambda n, _: 100_000 * (n % 2), promises=NOTHING),
    "WrongElsewhereUnpromised": wrong_elsewhere,
    "FirstCall": lambda: moving(lambda n, _: n > 1),  # right in its first call alone
    "ByAddress": by_address,
    "ByThreads": lambda: moving(lambda *_: torch.get_num_threads() - 1),
    "AnyGradients": any_gradients,
    "AnyGradientsUnpromised": lambda: any_gradients(promises_gradients=False),
    "ByPlace": by_place,
    # A sequence that is not alone is rounded by what the others hold.
    "ByNeighbours": lambda: moving(lambda _, inputs: len(inputs.q) > 1, promises=BATCH),
    "ReadsNeighbours": reads_neighbours,
    "WrongSplits": wrong_splits,
}

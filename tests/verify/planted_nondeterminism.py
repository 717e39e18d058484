"""Planted faults: kernels whose bits depend on something other than their inputs."""

import random
from dataclasses import replace
from itertools import count

import torch
from tests.planted_kernels.outputs_given import another_last_bit, in_turns, spoiled

NOTHING = frozenset()
BATCH = frozenset({"repeat", "batch"})


def shifted(steps, **promises):
    """A right kernel whose LSE is moved by ``steps(number of the call, inputs)`` ulps."""
    numbers = count(1)

    def shift(inputs, right):
        lse, last = right.lse, torch.full_like(right.lse, 1e9)
        for _ in range(int(steps(next(numbers), inputs))):
            lse = torch.nextafter(lse, last)
        return replace(right, lse=lse)

    return spoiled(shift, **promises)


def any_order(**promises):
    """Like a kernel with atomics, which add in any order: some calls round differently."""
    order = random.Random(1)  # noqa: S311  # an order, and no secret
    return shifted(lambda *_: order.randrange(3), **promises)


def wrong_elsewhere():
    """Wrong in every second place where it is prepared; right in the first."""
    prepared = []
    kernel = shifted(lambda *_: 100_000 * (len(prepared) % 2 == 0), promises=NOTHING)
    right = kernel.prepare

    def prepare(inputs):
        prepared.append(inputs)
        return right(inputs)

    kernel.prepare = prepare
    return kernel


def by_address():
    """Rounds differently once its keys begin at another address, like another vector width."""
    first = []

    def steps(_, inputs):
        first.append(inputs.k.data_ptr())
        return first[-1] != first[0]

    return shifted(steps)


def any_gradients(**promises):
    """Its dq differs in every second call."""

    def change(right, number):
        further = torch.full_like(right.dq.float(), 2.0 ** ((number - 1) % 2))
        return replace(right, dq=(right.dq.float() * further).to(right.dq.dtype))

    return spoiled(in_turns(change), **promises)


def by_place():
    """Rounds the first sequence of a batch differently from the others."""

    def change(_, right):
        lse = right.lse.clone()
        lse[0] = another_last_bit(lse[0])
        return replace(right, lse=lse)

    return spoiled(change, promises=BATCH)


def reads_neighbours():
    """Promises nothing, and is wrong by far more than rounding if the batch has other sequences."""

    def change(inputs, right):
        return replace(right, lse=right.lse + 0.5 * (len(inputs.q) > 1))

    return spoiled(change, promises=NOTHING)


def wrong_splits():
    """Right with its default launch; its other launch loses a split."""
    lost = spoiled(lambda _, right: replace(right, lse=right.lse - 0.5))
    return spoiled(lambda *_: None, launches=lambda *_: {"splits": lost})


KERNELS = {
    "AnyOrder": any_order,
    "AnyOrderUnpromised": lambda: any_order(promises=NOTHING),
    "WrongUnpromised": lambda: shifted(lambda n, _: 100_000 * (n % 2), promises=NOTHING),
    "WrongElsewhereUnpromised": wrong_elsewhere,
    "FirstCall": lambda: shifted(lambda n, _: n > 1),  # right in its first call alone
    "ByAddress": by_address,
    "ByThreads": lambda: shifted(lambda *_: torch.get_num_threads() - 1),
    "AnyGradients": any_gradients,
    "AnyGradientsUnpromised": lambda: any_gradients(promises_gradients=False),
    "ByPlace": by_place,
    # Rounds differently if the batch has more than one sequence.
    "ByNeighbours": lambda: shifted(lambda _, inputs: len(inputs.q) > 1, promises=BATCH),
    "ReadsNeighbours": reads_neighbours,
    "WrongSplits": wrong_splits,
}

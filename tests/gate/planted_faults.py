"""Kernels of the fault table: right, but for what the query length says; and one with a bad name.

One class for all of them: a process serves many Cases, and after each fault a right one.
"""

import ctypes
import os
from dataclasses import replace

import torch

from attncheck.subjects.ideal import Ideal

RIGHT = 2
_KEPT = []
_SEEN = {}


def writes_beside_its_output(inputs, outputs):
    after = outputs.out.data_ptr() + outputs.out.numel() * outputs.out.element_size()
    ctypes.memset(after, 0x11, 1)


def leaves_rows_unwritten(inputs, outputs):
    out = torch.empty_like(outputs.out)
    out[:, :, :-1] = outputs.out[:, :, :-1]
    return replace(outputs, out=out)


def multiplies_what_is_hidden(inputs, outputs):
    return replace(outputs, out=outputs.out + 0.0 * inputs.v.sum())


def stale_bytes(inputs, outputs):
    """The memory of its first call, which nobody has written again."""
    return _SEEN.setdefault("stale", outputs)


def kept_by_shape(inputs, outputs):
    return _SEEN.setdefault(inputs.q.shape, outputs)


def kept_by_pointer(inputs, outputs):
    return _SEEN.setdefault(inputs.q.data_ptr(), outputs)


def right_on_the_first_call(inputs, outputs):
    if _SEEN.setdefault("first", 0):
        outputs.out.add_(1)
    _SEEN["first"] += 1


def another_order(inputs, outputs):
    _SEEN["order"] = not _SEEN.get("order")
    if _SEEN["order"]:
        outputs.out.copy_(torch.nextafter(outputs.out, torch.zeros_like(outputs.out)))


def keeps_memory(inputs, outputs):
    _KEPT.append(torch.zeros(4096))


def keeps_descriptors(inputs, outputs):
    _KEPT.append(os.open(os.devnull, os.O_RDONLY))


def changes_the_default_dtype(inputs, outputs):
    torch.set_default_dtype(torch.float64)


def changes_the_working_directory(inputs, outputs):
    os.chdir("/")


FAULTS = dict(
    enumerate(
        (
            writes_beside_its_output,
            leaves_rows_unwritten,
            multiplies_what_is_hidden,
            stale_bytes,
            kept_by_shape,
            kept_by_pointer,
            right_on_the_first_call,
            another_order,
            keeps_memory,
            keeps_descriptors,
            changes_the_default_dtype,
            changes_the_working_directory,
        ),
        start=RIGHT + 1,
    )
)


class Planted(Ideal):
    """Its outputs lie in memory that it asks torch for."""

    name, summary = "planted", "right but for the fault"

    def prepare(self, inputs):
        call, fault = super().prepare(inputs), FAULTS.get(inputs.problem.query)

        def planted():
            right = call()
            made = {name: torch.empty_like(one) for name, one in right.tensors().items()}
            for name, one in right.tensors().items():
                made[name].copy_(one)
            outputs = replace(right, **made)
            return (fault(inputs, outputs) if fault else None) or outputs

        return planted


class Named(Ideal):
    """Wrong, so that everything that is written of a failure bears its name."""

    name, summary = "../../=cmd()<script>alert(1)</script>", "=cmd()|' /C calc'!A0"

    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: replace(call(), out=call().out + 1)

"""Kernels of the fault table: the query length selects the fault; and one with a bad name.

One class for all of them: a process runs many Cases, with a right one after each fault.
"""

import ctypes
import os
from dataclasses import replace

import torch

from attncheck.subjects.ideal import Ideal

RIGHT = 2
_RETAINED = []
_STATE = {}


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
    """Returns the memory of the first call, which nobody has rewritten."""
    return _STATE.setdefault("stale", outputs)


def kept_by_shape(inputs, outputs):
    return _STATE.setdefault(inputs.q.shape, outputs)


def kept_by_pointer(inputs, outputs):
    return _STATE.setdefault(inputs.q.data_ptr(), outputs)


def right_on_the_first_call(inputs, outputs):
    if _STATE.setdefault("first", 0):
        outputs.out.add_(1)
    _STATE["first"] += 1


def another_order(inputs, outputs):
    _STATE["order"] = not _STATE.get("order")
    if _STATE["order"]:
        outputs.out.copy_(torch.nextafter(outputs.out, torch.zeros_like(outputs.out)))


def keeps_memory(inputs, outputs):
    _RETAINED.append(torch.zeros(4096))


def keeps_descriptors(inputs, outputs):
    _RETAINED.append(os.open(os.devnull, os.O_RDONLY))


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
    """Outputs are in memory allocated with torch, right except for the selected fault."""

    name, summary = "planted", "right but for the fault"

    def prepare(self, inputs):
        call, fault = super().prepare(inputs), FAULTS.get(inputs.problem.query)

        def planted():
            right = call()
            copies = {name: torch.empty_like(tensor) for name, tensor in right.tensors().items()}
            for name, tensor in right.tensors().items():
                copies[name].copy_(tensor)
            outputs = replace(right, **copies)
            return (fault(inputs, outputs) if fault else None) or outputs

        return planted


class Named(Ideal):
    """Wrong, so that every file about the failure contains its name."""

    name, summary = "../../=cmd()<script>alert(1)</script>", "=cmd()|' /C calc'!A0"

    def prepare(self, inputs):
        call = super().prepare(inputs)
        return lambda: replace(call(), out=call().out + 1)

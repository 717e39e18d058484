"""What a kernel owes: outputs of the right kind in memory of their own, and inputs left alone.

What looks at inputs after a kernel has run was bound when this module was imported, before any
kernel's: one that puts its own ``equal`` in torch's place is told all the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import torch

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.captured_gradients import captured_tensors

DIGITS = 32  # hexadecimal digits: 128 bits, so that two that are equal are no coincidence


def outputs_digest(outputs: Outputs) -> str:
    """SHA-256 of every bit of ``outputs``, cut to ``DIGITS`` hexadecimal digits.

    Names, shapes and dtypes of the tensors and their bytes, row-major whatever their strides: equal
    digests are equal results, bit for bit. −0.0 is another result than 0.0, and a NaN another than
    a NaN with other bits.
    """
    digest = hashlib.sha256()
    for name, tensor in outputs.tensors().items():
        about = [name, list(tensor.shape), str(tensor.dtype)]
        digest.update(json.dumps(about).encode() + b"\n")
        # Through flat bytes: numpy has no bfloat16, nor torch's fp8.
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        # Into pinned memory: to any other a copy holds up what else is asked of the GPU.
        host = torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda)
        digest.update(host.copy_(flat).numpy().data)
    return digest.hexdigest()[:DIGITS]


_SHA256, _EQUAL = hashlib.sha256, torch.equal
_CPU, _CONTIGUOUS, _FLAT = torch.Tensor.cpu, torch.Tensor.contiguous, torch.Tensor.flatten
_VIEW, _NUMPY, _STORAGE = torch.Tensor.view, torch.Tensor.numpy, torch.Tensor.untyped_storage
# A Parameter is a tensor with a flag; any other subclass may compute when it is looked at.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def output_error(outputs: object, inputs: Inputs) -> str:
    """Return the fault in shapes, dtypes or device of ``outputs``; empty when there is none."""
    if not isinstance(outputs, Outputs):
        return f"returned {type(outputs).__name__}, but should return Outputs."
    for name, (shape, dtype) in _owed(inputs).items():
        tensor = getattr(outputs, name)
        if name == "lse" and tensor is None:  # which a kernel may keep to itself
            continue
        if wrong := _tensor_error(name, tensor, shape, dtype, inputs.device):
            return wrong
    return ""


def output_bytes(inputs: Inputs) -> int:
    """Bytes of the outputs that are asked for, LSE and every gradient among them."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in _owed(inputs).values())


def _owed(inputs: Inputs) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every output: LSE and gradients of what is captured are fp32."""
    problem = inputs.problem
    rows = (problem.batch, problem.heads, problem.query)
    columns = problem.kv if problem.operation == "softmax" else problem.value_dim
    out = (*rows, columns), problem.formats.output.torch_dtype
    if not problem.backward:
        return {"out": out, "lse": (rows, torch.float32)}
    like = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v, "dsink": inputs.sink}
    gradients = {n: (tuple(t.shape), t.dtype) for n, t in like.items() if t is not None}
    if problem.dcaptured:
        mod = problem.score_mod(str(inputs.device))
        numbers = sum(tensor.numel() for tensor in captured_tensors(mod, inputs.device))
        gradients["dcaptured"] = ((numbers,), torch.float32)
    return {"out": out, "lse": (rows, torch.float32), **gradients}


def requested_outputs(outputs: Outputs, problem: Problem) -> Outputs:
    """``outputs`` without what nobody asked for: gradients of a forward, say."""
    if not problem.backward:
        return Outputs(outputs.out, outputs.lse)
    return dataclasses.replace(
        outputs,
        dsink=outputs.dsink if problem.sink else None,
        dcaptured=outputs.dcaptured if problem.dcaptured else None,
    )


def _tensor_error(
    name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{name} is {type(value).__name__}, but should be a tensor."
    # One with attributes in place of torch's would say what it likes of itself.
    own = [attribute for attribute in vars(value) if hasattr(torch.Tensor, attribute)]
    if type(value) not in _PLAIN or own:
        kind = f"a tensor with a {own[0]!r} of its own" if own else type(value).__name__
        return f"{name} is {kind}, but should be a torch.Tensor itself."
    if tuple(value.shape) != shape:
        return f"{name}.shape={tuple(value.shape)}, but should be {shape}."
    for fact, wanted in {"device": device, "layout": torch.strided, "dtype": dtype}.items():
        if getattr(value, fact) != wanted:
            return f"{name}.{fact}={getattr(value, fact)}, but should be {wanted}."
    return ""


def written_input(copies: Inputs, inputs: Inputs) -> str:
    """Return which of its inputs a kernel changed; empty when none."""
    for name, mine in inputs.tensors().items():
        its = copies.tensors()[name]
        # It may lie among other numbers, so that its memory is larger; but where it has none it may
        # not be read any more.
        last = sum((n - 1) * stride for n, stride in zip(its.shape, its.stride(), strict=True))
        needed = (its.storage_offset() + last + 1) * its.element_size() if its.numel() else 0
        if _STORAGE(its).nbytes() < needed:
            return f"freed the memory of its input {name}."
        # As bytes: a NaN that was in the input equals itself only so.
        if not _EQUAL(*(_VIEW(_CONTIGUOUS(t), torch.uint8) for t in (mine, its))):
            return f"wrote to its input {name}."
    return ""


def arithmetic_error(arithmetic: object, inputs: Inputs) -> str:
    """Return what is wrong with the arithmetic a kernel declares; empty when nothing is."""
    if not isinstance(arithmetic, Arithmetic):
        return f"arithmetic() returned {type(arithmetic).__name__}, but should return Arithmetic."
    output = inputs.problem.formats.output
    if arithmetic.output != output:
        name = getattr(arithmetic.output, "name", arithmetic.output)
        return f"arithmetic().output is {name}, but should be {output.name}."
    return ""


def aliased_input(outputs: Outputs, copies: Inputs) -> str:
    """Return which of ``outputs`` lies in the memory of which input; empty when none does."""
    for name, tensor in outputs.tensors().items():
        for read, its in copies.tensors().items():
            if _share(tensor, its):
                return f"{name} lies in the memory of its input {read}."
    return ""


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the memory that the two were allocated in overlaps."""
    mine, its = one.untyped_storage(), other.untyped_storage()
    # All of the storage, because a view can reach every byte of it.
    start, stop = mine.data_ptr(), mine.data_ptr() + mine.nbytes()
    return start < its.data_ptr() + its.nbytes() and its.data_ptr() < stop


def inputs_digest(inputs: Inputs) -> str:
    """SHA-256 of every bit that can be read of ``inputs``, in hexadecimal digits."""
    digest = _SHA256()
    for name, tensor in inputs.tensors().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        flat = _FLAT(_CONTIGUOUS(_CPU(tensor)))
        digest.update(_NUMPY(_VIEW(flat, torch.uint8)).data)
    return digest.hexdigest()

"""Obligations of a kernel: outputs of the right form in memory of their own, inputs unchanged.

The functions that check inputs after a kernel has run are bound at this module's import, before any
kernel's, so that a kernel which replaces ``torch.equal`` is detected all the same.
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

DIGITS = 32  # Hexadecimal digits: with 128 bits, different outputs do not collide by chance.


def outputs_digest(outputs: Outputs) -> str:
    """Return the SHA-256 of every bit of ``outputs``, cut to ``DIGITS`` hexadecimal digits.

    It covers names, shapes, dtypes and bytes, row-major whatever the strides: equal digests mean
    equal results, bit for bit. −0.0 differs from 0.0, and NaNs with other bits differ.
    """
    digest = hashlib.sha256()
    for name, tensor in outputs.tensors().items():
        about = [name, list(tensor.shape), str(tensor.dtype)]
        digest.update(json.dumps(about).encode() + b"\n")
        # As flat bytes, because numpy has neither bfloat16 nor torch's fp8.
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        # Pinned, because a copy to other memory holds up other work of the GPU.
        host = torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda)
        digest.update(host.copy_(flat).numpy().data)
    return digest.hexdigest()[:DIGITS]


_SHA256, _EQUAL = hashlib.sha256, torch.equal
_CPU, _CONTIGUOUS, _FLAT = torch.Tensor.cpu, torch.Tensor.contiguous, torch.Tensor.flatten
_VIEW, _NUMPY, _STORAGE = torch.Tensor.view, torch.Tensor.numpy, torch.Tensor.untyped_storage
# A Parameter is a tensor with a flag; any other subclass may run code when it is read.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def output_error(outputs: object, inputs: Inputs) -> str:
    """Return the fault in shapes, dtypes or device of ``outputs``; empty if there is none."""
    if not isinstance(outputs, Outputs):
        return f"returned {type(outputs).__name__}, but should return Outputs."
    for name, (shape, dtype) in _output_types(inputs).items():
        tensor = getattr(outputs, name)
        if name == "lse" and tensor is None:  # A kernel need not return it.
            continue
        if fault := _tensor_error(name, tensor, shape, dtype, inputs.device):
            return fault
    return ""


def output_bytes(inputs: Inputs) -> int:
    """Return the bytes of the requested outputs, including LSE and every gradient."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in _output_types(inputs).values())


def _output_types(inputs: Inputs) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every output; LSE and the captured tensors' gradients are fp32."""
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
    """Return ``outputs`` without those not requested, such as gradients of a forward."""
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
    # Attributes that hide torch's could report a wrong shape or dtype.
    shadows = [attribute for attribute in vars(value) if hasattr(torch.Tensor, attribute)]
    if type(value) not in _PLAIN or shadows:
        kind = f"a tensor with a {shadows[0]!r} of its own" if shadows else type(value).__name__
        return f"{name} is {kind}, but should be a torch.Tensor itself."
    if tuple(value.shape) != shape:
        return f"{name}.shape={tuple(value.shape)}, but should be {shape}."
    for fact, expected in {"device": device, "layout": torch.strided, "dtype": dtype}.items():
        if getattr(value, fact) != expected:
            return f"{name}.{fact}={getattr(value, fact)}, but should be {expected}."
    return ""


def written_input(copies: Inputs, inputs: Inputs) -> str:
    """Return a message that a kernel wrote to or freed an input; empty if none."""
    for name, original in inputs.tensors().items():
        copy = copies.tensors()[name]
        # A storage is larger than the input if that is a view. If it is smaller, the kernel has
        # freed it, and it must not be read.
        last = sum((n - 1) * stride for n, stride in zip(copy.shape, copy.stride(), strict=True))
        needed = (copy.storage_offset() + last + 1) * copy.element_size() if copy.numel() else 0
        if _STORAGE(copy).nbytes() < needed:
            return f"freed the memory of its input {name}."
        # As bytes, so that NaNs in the input compare equal.
        if not _EQUAL(*(_VIEW(_CONTIGUOUS(t), torch.uint8) for t in (original, copy))):
            return f"wrote to its input {name}."
    return ""


def arithmetic_error(arithmetic: object, inputs: Inputs) -> str:
    """Return the fault in the arithmetic that a kernel declares; empty if there is none."""
    if not isinstance(arithmetic, Arithmetic):
        return f"arithmetic() returned {type(arithmetic).__name__}, but should return Arithmetic."
    output = inputs.problem.formats.output
    if arithmetic.output != output:
        name = getattr(arithmetic.output, "name", arithmetic.output)
        return f"arithmetic().output is {name}, but should be {output.name}."
    return ""


def aliased_input(outputs: Outputs, copies: Inputs) -> str:
    """Return a message that an output lies in the memory of an input; empty if none does."""
    for name, tensor in outputs.tensors().items():
        for read, copy in copies.tensors().items():
            if _overlap(tensor, copy):
                return f"{name} lies in the memory of its input {read}."
    return ""


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the storages of two tensors overlap."""
    first, second = one.untyped_storage(), other.untyped_storage()
    # The whole storage, because a view can reach every byte of it.
    start, stop = first.data_ptr(), first.data_ptr() + first.nbytes()
    return start < second.data_ptr() + second.nbytes() and second.data_ptr() < stop


def inputs_digest(inputs: Inputs) -> str:
    """Return the SHA-256 of every element of ``inputs``, in hexadecimal digits."""
    digest = _SHA256()
    for name, tensor in inputs.tensors().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        flat = _FLAT(_CONTIGUOUS(_CPU(tensor)))
        digest.update(_NUMPY(_VIEW(flat, torch.uint8)).data)
    return digest.hexdigest()

"""Weights of a tile on a Hopper GPU, exp(scale · q·kᵀ), in one pass over its scores.

By torch a tile costs a product that writes its scores, a pass for the exponential, one for a
partial mask, and row sums; a backward one more, for dP. At 64 and 128 dimensions those passes take
longer than the product. Here they are done where the product leaves its sums.

The compiler is CUDA's own, not Triton, whose faults would be the kernels' too. Sums are float64's,
on its tensor cores; ``exp`` is the one that torch calls, off by 1 ulp at most; and the scale is
multiplied to the rounded sum, as by torch: nothing is rounded that torch does not round.

The compiler, NVRTC, comes with torch and is called through ctypes: torch's own way to it (2.11) is
private and asks for a CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attncheck.core.errors import HostError
from attncheck.inputs.problem import Problem

Launch = Callable[[tuple[int, int, int], Sequence[Tensor | int | float | None]], None]
"""Runs a kernel on torch's current stream: a grid, and what it is given; None is no pointer."""

_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_TILE, _STEP, _STAGES = 64, 16, 3  # rows and keys of a block; dimensions at a time, and ahead
_WARP = 32  # rows and keys of a warp
_ROW = _STEP + 2  # numbers in a row of shared memory: no two of a quarter of a warp in one bank
_HOPPER = (9, 0)  # whose instruction it is; other tensor cores have a slower one, or none
# Multiplications of q·k and P·V from which it is worth the time that CUDA's compiler takes.
_FEWEST_PRODUCTS = 2**38


def fused_weights(
    problem: Problem, device: torch.device, *, gradient: bool = False
) -> FusedWeights | None:
    """Return the pass for tiles of ``problem``; None where torch's are used in its place.

    Args:
        gradient: Whether it gives dX too.
    """
    dims = problem.head_dim, problem.value_dim
    products = problem.batch * problem.heads * problem.query * problem.kv * sum(dims)
    if device.type != "cuda" or torch.version.hip or products < _FEWEST_PRODUCTS:
        return None
    if torch.cuda.get_device_capability(device) != _HOPPER or any(dim % _STEP for dim in dims):
        return None
    try:
        return FusedWeights(device, gradient=gradient)
    except HostError:  # without CUDA's compiler: torch's are as exact, and slower
        return None


class FusedWeights:
    """The pass on one device."""

    def __init__(self, device: torch.device, *, gradient: bool = False) -> None:
        self._launch = _compiled(device, gradient)

    def __call__(
        self,
        weights: Tensor,
        q: Tensor,
        k: Tensor,
        seen: Tensor | None,
        scale: float,
        of_values: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Fill ``weights`` with exp(scale · q·kᵀ), 0 where not seen.

        Args:
            weights: ``(batch · kv_heads, group · rows, keys)``, contiguous; an even number of keys.
            q: ``(batch · kv_heads, group · rows, head_dim)``, and as all lines here next to each
                other and at multiples of 16 bytes.
            k: ``(batch · kv_heads, keys, head_dim)``.
            seen: Bool ``(batch, heads, rows, keys)``; None where everything is.
            of_values: With ``gradient`` dX, to be filled with weights · (loss·vᵀ + term), of the
                shape of ``weights``; loss, and behind its last column the term, for each row; and
                v ``(batch · kv_heads, keys, value_dim)``.

        Returns:
            Sums over parts of the keys, ``(batch · kv_heads, group · rows, parts)``.
        """
        lines, rows, keys = weights.shape
        blocks = -(-keys // _TILE)
        sums = weights.new_empty(lines, rows, blocks * _TILE // _WARP)
        dx, loss, v = of_values or (weights, q, k)
        of_head = rows if seen is None else seen.shape[2]
        kv_heads = lines if seen is None else seen.shape[1] * of_head // rows
        self._launch(
            (blocks, -(-rows // _TILE), lines),
            [
                *(weights, dx, sums, q, k, loss, v, seen, scale),
                *(rows, keys, q.shape[2], v.shape[2], kv_heads, of_head),
                *(each.stride(axis) for each in (q, k, loss, v) for axis in (0, 1)),
                *((0, 0, 0, 0) if seen is None else seen.stride()),
            ],
        )
        return sums


@functools.cache
def _compiled(device: torch.device, gradient: bool) -> Launch:  # noqa: FBT001  # a key
    sizes = {"TILE": _TILE, "STEP": _STEP, "STAGES": _STAGES, "ROW": _ROW}
    defines = [f"{name}={size}" for name, size in sizes.items()]
    return compile_kernel(
        Path(__file__).with_suffix(".cu").read_text(encoding="utf-8"),
        "fused_weights",
        [*defines, "GRADIENT"] if gradient else defines,
        device=device,
        threads=(_TILE // _WARP) ** 2 * 32,
        shared=_STAGES * 2 * _TILE * _ROW * torch.finfo(torch.float64).bits // 8,
    )


def compile_kernel(
    source: str,
    name: str,
    defines: Sequence[str],
    *,
    device: torch.device,
    threads: int,
    shared: int,
) -> Launch:
    """Return the kernel ``name`` of CUDA C++ ``source`` on ``device``.

    Args:
        defines: Such as ``TILE=64``.
        threads: Of a block.
        shared: Bytes of a block's shared memory.

    Raises HostError where there is no NVRTC, or it refuses.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # there is a context from here on
        driver, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(module), _cubin(source, defines, device)))
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        _check(driver.cuFuncSetAttribute(function, _MOST_SHARED, shared))

    def launch(grid: tuple[int, int, int], given: Sequence[Tensor | int | float | None]) -> None:
        values = [_c_value(each) for each in given]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            sizes = (*grid, threads, 1, 1, shared)
            _check(driver.cuLaunchKernel(function, *sizes, stream, pointers, None))

    return launch


def _c_value(
    given: Tensor | int | float | None,
) -> ctypes.c_void_p | ctypes.c_long | ctypes.c_double:
    if given is None or isinstance(given, Tensor):
        return ctypes.c_void_p(None if given is None else given.data_ptr())
    return ctypes.c_long(given) if isinstance(given, int) else ctypes.c_double(given)


def _cubin(source: str, defines: Sequence[str], device: torch.device) -> bytes:
    try:
        nvrtc = ctypes.CDLL(f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError as error:
        raise HostError(f"CUDA's compiler cannot be loaded: {error}.") from error
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None))
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", *(f"-D{each}" for each in defines)]
    listed = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), listed)
    suffix = "ProgramLog" if failed else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{suffix}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{suffix}")(program, text)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise HostError(f"CUDA's compiler refuses: {text.value.decode(errors='replace')}")
    return text.raw


def _check(code: int) -> None:
    if code:
        raise HostError(f"CUDA's driver or compiler answers {code} in place of 0.")

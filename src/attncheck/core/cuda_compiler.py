"""Compile CUDA C++ kernels at run time with NVRTC."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from attncheck.core.errors import HostError

Launch = Callable[[tuple[int, int, int], Sequence[Tensor | int | float | None]], None]
"""Launches a kernel with (grid, arguments) on torch's current stream; None is a null pointer."""

_MAX_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def compile_kernel(
    source: str,
    name: str,
    defines: Mapping[str, int],
    *,
    device: torch.device,
    threads: int,
    shared: int,
) -> Launch:
    """Return the kernel ``name`` of CUDA C++ ``source`` on ``device``.

    Args:
        defines: Compile-time numbers by their names in the source.
        threads: Threads of a block.
        shared: Bytes of a block's shared memory.

    Raises HostError if NVRTC is missing, or refuses the source.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # creates the CUDA context
        driver, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(module), _cubin(source, defines, device)))
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        _check(driver.cuFuncSetAttribute(function, _MAX_SHARED_ATTRIBUTE, shared))

    def launch(
        grid: tuple[int, int, int], arguments: Sequence[Tensor | int | float | None]
    ) -> None:
        values = [_c_value(each) for each in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            sizes = (*grid, threads, 1, 1, shared)
            _check(driver.cuLaunchKernel(function, *sizes, stream, pointers, None))

    return launch


def _c_value(
    argument: Tensor | int | float | None,
) -> ctypes.c_void_p | ctypes.c_long | ctypes.c_double:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_long(argument) if isinstance(argument, int) else ctypes.c_double(argument)


def _cubin(source: str, defines: Mapping[str, int], device: torch.device) -> bytes:
    try:
        nvrtc = ctypes.CDLL(f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError as error:
        raise HostError(f"CUDA's compiler cannot be loaded: {error}.") from error
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"", 0, None, None))
    major, minor = torch.cuda.get_device_capability(device)
    options = [
        f"--gpu-architecture=sm_{major}{minor}",
        *(f"-D{name}={value}" for name, value in defines.items()),
    ]
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

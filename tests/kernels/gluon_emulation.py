"""Gluon kernels without a GPU: their source runs as Python, with a thread for each group of warps.

Asynchronous copies and products are done at once, and layouts are ignored: this tests what a kernel
reads, writes and waits for, not whether it waits long enough. With ``delay_arrivals`` a thread that
arrives at a barrier pauses, so that all others first go on as far as they can.
"""

import math
import sys
import threading
import time
from functools import partial
from types import FunctionType, SimpleNamespace

import torch

from attncheck.mods import triton_functions

_TIMEOUT = 60.0  # seconds after which a wait is taken to be endless


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    pause = 0.0  # seconds for which a thread sleeps after its arrival

    def __init__(self, count):
        self.count = self.arrivals = count
        self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def update(self, arrivals=0, size=0):
        with self.changed:
            self.arrivals -= arrivals
            self.bytes += size
            assert self.arrivals >= 0, "more arrivals than a phase has room for"
            if self.arrivals == self.bytes == 0:
                self.arrivals = self.count
                self.phase += 1
                self.changed.notify_all()

    def arrive(self, count):
        self.update(count)
        time.sleep(self.pause)

    def wait(self, parity):
        with self.changed:
            ended = self.changed.wait_for(lambda: self.phase & 1 != int(parity), _TIMEOUT)
        assert ended, "a thread waits for a barrier at which no other arrives"


class Memory:
    """Shared memory: NaN before it is written."""

    def __init__(self, values, layout=None, barriers=None):
        self.values, self.layout, self.barriers = values, layout, barriers
        self.shape, self.dtype = list(values.shape), values.dtype

    def index(self, i):
        barriers = None if self.barriers is None else self.barriers[int(i)]
        return Memory(self.values[int(i)], self.layout, barriers)

    def reshape(self, shape):
        return Memory(self.values.view(shape))

    def permute(self, order):
        return Memory(self.values.permute(order))

    def slice(self, start, length, dim=0):
        return Memory(self.values.narrow(dim, start, length))

    def load(self, layout):
        return self.values.clone()

    def store(self, values):
        assert values.dtype == self.dtype
        self.values.copy_(values)


class Values(torch.Tensor):
    """A tensor in a warpgroup's registers."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if bitcast and dtype == torch.int64:  # stands for uint32
            return super().to(dtype) & 0xFFFFFFFF
        return self.view(dtype) if bitcast else super().to(dtype)


class Pointer:
    def __init__(self, tensor, offset=0):
        self.tensor, self.offset = tensor, offset

    def __add__(self, increment):
        return Pointer(self.tensor, self.offset + increment)

    def load(self):
        return self.tensor.view(-1)[torch.as_tensor(self.offset)]

    def store(self, value, mask):
        offset, value, mask = (torch.as_tensor(x) for x in (self.offset, value, mask))
        self.tensor.view(-1)[offset[mask]] = value.to(self.tensor.dtype)[mask]


class Descriptor:
    def __init__(self, descriptor):
        self.tensor, self.layout = descriptor.base, descriptor.layout
        self.dtype = self.tensor.dtype
        shape = descriptor.block_shape
        size = self.tensor.element_size() * math.prod(shape)
        self.block_type = SimpleNamespace(shape=shape, nbytes=size)

    def slices(self, coordinates):
        """Of the part of a block inside the tensor: its slices of the tensor and of the block."""
        starts = [int(c) for c in coordinates]
        axes = zip(starts, self.block_type.shape, self.tensor.shape, strict=True)
        sizes = [max(0, min(start + block, length) - start) for start, block, length in axes]
        return (
            tuple(slice(start, start + n) for start, n in zip(starts, sizes, strict=True)),
            tuple(slice(0, n) for n in sizes),
        )


def _maximum_without_nan(x, axis):
    """A maximum that drops NaN, as a GPU's does."""
    if x.is_floating_point():
        x = x.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    return x.amax(axis)


def _fma(*terms):
    a, b, c = (torch.as_tensor(x).double() for x in terms)
    return (a * b + c).float()


def _rebind(function, names):
    """A copy of a function whose global names are ``names``."""
    return FunctionType(function.__code__, names, argdefs=function.__defaults__)


def _emulated_mod(function, language):
    """A mod that was translated to Triton, and the functions that it calls, in ``language``."""
    names = {"tl": language["tl"], "_NVIDIA": False}
    for name, callee in vars(triton_functions).items():
        if hasattr(callee, "fn"):
            names[name] = _rebind(callee.fn, names)
    return _rebind(function, names)


def _atomic_add(lock, pointer, value, sem="acq_rel", scope="gpu"):
    time.sleep(0)  # let another thread run
    offset = torch.as_tensor(pointer.offset)
    flat = pointer.tensor.view(-1)
    with lock:
        before = flat[offset].clone()
        flat[offset] = before + value
    return before


def _load(descriptor, coordinates, barrier, memory):
    in_tensor, in_block = descriptor.slices(coordinates)
    memory.values.zero_()
    memory.values[in_block] = descriptor.tensor[in_tensor]
    barrier.barriers.update(size=-descriptor.block_type.nbytes)


def _store(descriptor, coordinates, memory):
    in_tensor, in_block = descriptor.slices(coordinates)
    descriptor.tensor[in_tensor] = memory.values[in_block]


def _product(a, b, acc, *, use_acc=True, is_async=False):
    time.sleep(0)  # let another thread run: the order of products is not defined
    a, b = (x.values if isinstance(x, Memory) else x for x in (a, b))
    product = a.float() @ b.float()
    return (acc + product if use_acc else product).as_subclass(Values)


def _wait_for_products(count, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


def _init(memory, count):
    memory.barriers.__init__(count)


class EmulatedKernel:
    """A Gluon kernel run as Python; launched as ``kernel[grid](…)``.

    Args:
        kernel: The Gluon kernel; its module's other global names stay as they are.
        callees: Functions that it calls, directly or through each other.
        resident: How many programs run at a time.
    """

    def __init__(self, kernel, callees, resident):
        self.names, self.resident = kernel.arg_names, resident
        self.lock = threading.Lock()
        self.thread = threading.local()  # holds the number of its program, and of all
        self.language = self._language()
        names = kernel.fn.__globals__ | self.language
        for function in (kernel.fn, *(callee.fn for callee in callees)):
            names[function.__name__] = _rebind(function, names)
        self.kernel = names[kernel.fn.__name__]

    def _language(self):
        """Python functions by the names of the Gluon and Triton functions that they replace."""

        def allocate(dtype, shape, layout):
            if dtype == torch.int64:
                return Memory(torch.zeros(shape), None, [Barrier(1) for _ in range(shape[0])])
            unwritten = float("nan") if dtype.is_floating_point else -1
            return Memory(torch.full(shape, unwritten, dtype=dtype), layout)

        no_layout = SimpleNamespace(get_default_for=lambda *_: None)
        language = {
            "minimum": lambda a, b: torch.fmin(torch.as_tensor(a), torch.as_tensor(b)),
            "maximum": lambda a, b: torch.fmax(torch.as_tensor(a), torch.as_tensor(b)),
            "cdiv": lambda a, b: (a + b - 1) // b,
            "arange": lambda start, end, layout=None: torch.arange(
                start, end, dtype=torch.int32
            ).as_subclass(Values),
            "full": lambda shape, value, dtype, layout: torch.full(
                shape, value, dtype=dtype
            ).as_subclass(Values),
            "where": lambda c, a, b: torch.where(torch.as_tensor(c), a, b),
            "exp2": torch.exp2,
            "log2": torch.log2,
            "abs": lambda x: torch.as_tensor(x).abs(),
            "fma": _fma,
            "rsqrt": torch.rsqrt,
            "div_rn": lambda a, b: torch.as_tensor(a) / torch.as_tensor(b),
            "max": _maximum_without_nan,
            "min": torch.amin,
            "sum": torch.sum,
            "zeros_like": torch.zeros_like,
            "load": Pointer.load,
            "store": Pointer.store,
            "program_id": lambda axis: torch.as_tensor(self.thread.program[0]),
            "num_programs": lambda axis: torch.as_tensor(self.thread.program[1]),
            "cast": lambda x, dtype: torch.as_tensor(x).to(dtype),
            "broadcast": torch.broadcast_tensors,
            "convert_layout": lambda x, layout, assert_trivial=False: x,
            "static_range": range,
            "allocate_shared_memory": allocate,
            "atomic_add": partial(_atomic_add, self.lock),
            "warp_specialize": self._warp_specialize,
            "float32": torch.float32, "int64": torch.int64, "NVMMASharedLayout": no_layout,
            "float16": torch.float16, "int32": torch.int32, "uint32": torch.int64,
            "int1": torch.bool,
        }  # fmt: skip
        for layout in (
            "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout",
            "SwizzledSharedLayout",
        ):  # fmt: skip
            language[layout] = lambda *_: None
        barriers = {
            "init": _init, "MBarrierLayout": lambda: None,
            "expect": lambda memory, size: memory.barriers.update(1, size),
            "arrive": lambda memory, count, pred=True: memory.barriers.arrive(count * bool(pred)),
            "wait": lambda memory, parity: memory.barriers.wait(parity),
        }  # fmt: skip
        namespace = SimpleNamespace(**language)
        return {
            "gl": namespace, "tl": namespace, "mbarrier": SimpleNamespace(**barriers),
            "load": _load, "store": _store, "tma": SimpleNamespace(store_wait=lambda _: None),
            "warpgroup_mma": _product, "warpgroup_mma_wait": _wait_for_products,
            "fence_async_shared": lambda: None, "barrier": lambda: None,
        }  # fmt: skip

    def _warp_specialize(self, parts, warps, registers):
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        program = self.thread.program

        def run_part(function, arguments):
            self.thread.program = program
            function(*arguments)

        _run_at_once([partial(run_part, *part) for part in parts])

    def _emulate(self, value):
        """The counterpart of a kernel's argument."""
        if hasattr(value, "block_shape"):
            return Descriptor(value)
        if isinstance(value, torch.Tensor):
            return Pointer(value)
        if isinstance(value, tuple):
            return tuple(map(self._emulate, value))
        function = getattr(value, "fn", None)  # a mod
        return value if function is None else _emulated_mod(function, self.language)

    def __getitem__(self, grid):
        def launch(*values, num_warps=4, enable_fp_fusion=True, **constants):
            by_name = dict(zip(self.names, values, strict=False)) | constants
            arguments = {name: self._emulate(value) for name, value in by_name.items()}
            slots = threading.Semaphore(self.resident)

            def run_program(number):
                self.thread.program = number, grid[0]
                with slots:
                    self.kernel(**arguments)

            _run_at_once([partial(run_program, number) for number in range(grid[0])])

        return launch


def delay_arrivals(monkeypatch):
    """Make every thread pause after arriving at a barrier, and endless waits fail soon."""
    monkeypatch.setattr(Barrier, "pause", 0.01)
    monkeypatch.setattr(sys.modules[__name__], "_TIMEOUT", 3.0)


def _run_at_once(parts):
    """Run each part in a thread of its own; raise the first exception of any."""
    errors = []

    def run(part):
        try:
            part()
        except BaseException as error:  # noqa: BLE001  (it is raised in the caller's thread)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(part,), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _TIMEOUT)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)

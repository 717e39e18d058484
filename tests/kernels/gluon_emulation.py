"""Gluon kernels without a GPU: their Python, run by a thread for each group of warps.

What is asynchronous on a GPU is done at once here, and layouts mean nothing: shown is what a kernel
reads, writes and waits for, not that it waits long enough. With ``dawdle`` who gives something
back lets all others go on first, as far as they can.
"""

import sys
import threading
import time
from types import FunctionType, SimpleNamespace

import torch

from attncheck.mods import triton_functions

_PATIENCE = 60.0  # seconds that a thread waits before it is said to wait for ever


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    pause = 0.0  # seconds that who arrives stands still

    def __init__(self, count):
        self.count = self.arrivals = count
        self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def update(self, arrivals=0, size=0):
        with self.changed:
            self.arrivals -= arrivals
            self.bytes += size
            assert self.arrivals >= 0, "more arrive than a phase has room for"
            if self.arrivals == self.bytes == 0:
                self.arrivals = self.count
                self.phase += 1
                self.changed.notify_all()

    def arrive(self, count):
        self.update(count)
        time.sleep(self.pause)

    def wait(self, parity):
        with self.changed:
            ended = self.changed.wait_for(lambda: self.phase & 1 != int(parity), _PATIENCE)
        assert ended, "a barrier is waited for and nobody comes"


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
    """What a warpgroup has in its registers."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if bitcast and dtype == torch.int64:  # 32 bits without a sign
            return super().to(dtype) & 0xFFFFFFFF
        return self.view(dtype) if bitcast else super().to(dtype)


class Pointer:
    def __init__(self, tensor, at=0):
        self.tensor, self.at = tensor, at

    def __add__(self, more):
        return Pointer(self.tensor, self.at + more)

    def load(self):
        return self.tensor.view(-1)[torch.as_tensor(self.at)]

    def store(self, value, mask):
        at, value, mask = (torch.as_tensor(x) for x in (self.at, value, mask))
        self.tensor.view(-1)[at[mask]] = value.to(self.tensor.dtype)[mask]


class Descriptor:
    def __init__(self, made):
        self.tensor, self.layout, self.dtype = made.base, made.layout, made.base.dtype
        size = made.base.element_size()
        for length in made.block_shape:
            size *= length
        self.block_type = SimpleNamespace(shape=made.block_shape, nbytes=size)

    def places(self, coordinates):
        """Of each axis where the block is in the tensor, and where that is in the block."""
        here = [int(c) for c in coordinates]
        ends = zip(here, self.block_type.shape, self.tensor.shape, strict=True)
        kept = [max(0, min(start + block, length) - start) for start, block, length in ends]
        return (
            tuple(slice(start, start + n) for start, n in zip(here, kept, strict=True)),
            tuple(slice(0, n) for n in kept),
        )


def _number(x):
    return torch.as_tensor(x)


def _largest(x, axis):
    """A maximum that drops NaN, as a GPU's does."""
    return (x.nan_to_num(-torch.inf, torch.inf, -torch.inf) if x.is_floating_point() else x).amax(
        axis
    )


def _fma(a, b, c):
    return (a * b + c).float()


def _in_world(function, language):
    """A mod that is printed for Triton, and the functions that it calls, in another language."""
    world = {"tl": language["tl"], "_NVIDIA": False}
    for name, callee in vars(triton_functions).items():
        if hasattr(callee, "fn"):
            world[name] = FunctionType(callee.fn.__code__, world)
    return FunctionType(function.__code__, world, argdefs=function.__defaults__)


def _atomic_add(lock, pointer, value, sem="acq_rel", scope="gpu"):
    time.sleep(0)
    at = torch.as_tensor(pointer.at)
    flat = pointer.tensor.view(-1)
    with lock:
        before = flat[at].clone()
        flat[at] = before + value
    return before


def _load(descriptor, coordinates, barrier, memory):
    there, here = descriptor.places(coordinates)
    memory.values.zero_()
    memory.values[here] = descriptor.tensor[there]
    barrier.barriers.update(size=-descriptor.block_type.nbytes)


def _store(descriptor, coordinates, memory):
    there, here = descriptor.places(coordinates)
    descriptor.tensor[there] = memory.values[here]


def _product(a, b, acc, *, use_acc=True, is_async=False):
    time.sleep(0)  # who goes on is not told
    a, b = (x.values if isinstance(x, Memory) else x for x in (a, b))
    product = a.float() @ b.float()
    return (acc + product if use_acc else product).as_subclass(Values)


def _waited(count, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


def _init(memory, count):
    memory.barriers.__init__(count)


class Emulated:
    """A kernel that is launched as ``kernel[grid](…)``.

    Args:
        kernel: The Gluon kernel, of whose module what it calls is read by name.
        callees: Functions that it calls, themselves or through each other.
        resident: How many programs run at a time.
    """

    def __init__(self, kernel, callees, resident):
        self.names, self.resident = kernel.arg_names, resident
        self.lock = threading.Lock()
        self.thread = threading.local()  # of which program it is
        self.language = self._fakes()
        world = kernel.fn.__globals__ | self.language
        for function in (kernel.fn, *(callee.fn for callee in callees)):
            world[function.__name__] = FunctionType(
                function.__code__, world, argdefs=function.__defaults__
            )
        self.kernel = world[kernel.fn.__name__]

    def _fakes(self):
        def allocate(dtype, shape, layout):
            if dtype == torch.int64:
                return Memory(torch.zeros(shape), None, [Barrier(1) for _ in range(shape[0])])
            unwritten = float("nan") if dtype.is_floating_point else -1
            return Memory(torch.full(shape, unwritten, dtype=dtype), layout)

        nothing = SimpleNamespace(get_default_for=lambda *_: None)
        language = {
            "minimum": lambda a, b: torch.fmin(_number(a), _number(b)),
            "maximum": lambda a, b: torch.fmax(_number(a), _number(b)),
            "cdiv": lambda a, b: (a + b - 1) // b,
            "arange": lambda start, end, layout=None: torch.arange(
                start, end, dtype=torch.int32
            ).as_subclass(Values),
            "full": lambda shape, value, dtype, layout: torch.full(
                shape, value, dtype=dtype
            ).as_subclass(Values),
            "where": lambda c, a, b: torch.where(_number(c), a, b),
            "exp2": torch.exp2,
            "log2": torch.log2,
            "abs": lambda x: _number(x).abs(),
            "fma": lambda *given: _fma(*(_number(x).double() for x in given)),
            "rsqrt": torch.rsqrt,
            "div_rn": lambda a, b: _number(a) / _number(b),
            "max": _largest,
            "min": torch.amin,
            "sum": torch.sum,
            "zeros_like": torch.zeros_like,
            "load": Pointer.load,
            "store": Pointer.store,
            "program_id": lambda axis: _number(self.thread.program[0]),
            "num_programs": lambda axis: _number(self.thread.program[1]),
            "cast": lambda x, dtype: _number(x).to(dtype),
            "broadcast": torch.broadcast_tensors,
            "convert_layout": lambda x, layout, assert_trivial=False: x,
            "static_range": range,
            "allocate_shared_memory": allocate,
            "atomic_add": lambda *given, **how: _atomic_add(self.lock, *given, **how),
            "warp_specialize": self._specialise,
            "float32": torch.float32, "int64": torch.int64, "NVMMASharedLayout": nothing,
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
        spaces = SimpleNamespace(**language)
        return {
            "gl": spaces, "tl": spaces, "mbarrier": SimpleNamespace(**barriers), "load": _load,
            "store": _store, "tma": SimpleNamespace(store_wait=lambda _: None),
            "warpgroup_mma": _product, "warpgroup_mma_wait": _waited,
            "fence_async_shared": lambda: None, "barrier": lambda: None,
        }  # fmt: skip

    def _specialise(self, parts, warps, registers):
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        own = self.thread.program

        def part(f, given):
            self.thread.program = own
            f(*given)

        _run([lambda f=f, given=given: part(f, given) for f, given in parts])

    def _emulate(self, value):
        """What a kernel is given, as its Python takes it."""
        if hasattr(value, "block_shape"):
            return Descriptor(value)
        if isinstance(value, torch.Tensor):
            return Pointer(value)
        if isinstance(value, tuple):
            return tuple(map(self._emulate, value))
        function = getattr(value, "fn", None)  # a mod
        return value if function is None else _in_world(function, self.language)

    def __getitem__(self, grid):
        def launch(*given, num_warps=4, enable_fp_fusion=True, **constants):
            named = dict(zip(self.names, given, strict=False)) | constants
            arguments = {name: self._emulate(value) for name, value in named.items()}
            room = threading.Semaphore(self.resident)

            def program(number):
                self.thread.program = number, grid[0]
                with room:
                    self.kernel(**arguments)

            _run([lambda number=number: program(number) for number in range(grid[0])])

        return launch


def dawdle(monkeypatch):
    """Make who arrives at a barrier the slowest, and a wait for ever short."""
    monkeypatch.setattr(Barrier, "pause", 0.01)
    monkeypatch.setattr(sys.modules[__name__], "_PATIENCE", 3.0)


def _run(parts):
    """All of them at the same time, or what the first of them raised."""
    raised = []

    def caught(part):
        try:
            part()
        except BaseException as error:  # noqa: BLE001  (it is raised in the caller's thread)
            raised.append(error)

    threads = [threading.Thread(target=caught, args=(part,), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads)

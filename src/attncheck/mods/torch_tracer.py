"""Records a mod's operations by torch's tracer, with the source line of each operation."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attncheck.core.errors import TraceError
from attncheck.core.own_process import no_garbage_collection
from attncheck.core.source_files import error_line

PLACE = "attncheck_place"
"""Key of a node's ``meta``: where in the mod it was recorded (`` at file:line `text```)."""


# --- names and lines of a mod in messages -----------------------------------------------------

# Frames in torch and in this package are not the mod's, except in three modules that hold mods.
_NOT_THE_MOD = (
    str(Path(torch.__file__).parent),
    *(
        str(file)
        for file in Path(__file__).parent.glob("*.py")
        if file.stem not in {"masks", "scores", "page_table"}
    ),
)


def describe_mod(what: str, mod: Any) -> str:
    """Return ``mask 'name'``: for a partial its function's name, for an object its class's."""
    while isinstance(mod, functools.partial):
        mod = mod.func
    return f"{what} {getattr(mod, '__name__', type(mod).__name__)!r}"


def current_mod_line() -> str:
    """Return the innermost line of the mod that is running, `` at file:line `text```, or ""."""
    frame: FrameType | None = sys._getframe(1)
    place = ""
    while frame is not None and not place:
        place = _place(frame, frame.f_lineno)
        frame = frame.f_back
    return place


def failing_mod_line(error: BaseException) -> str:
    """Return the innermost line of the mod in the traceback of ``error``, or ""."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        place = _place(traceback.tb_frame, traceback.tb_lineno) or place
        traceback = traceback.tb_next
    return place


def _place(frame: FrameType, line: int) -> str:
    file = frame.f_code.co_filename
    if file.startswith(_NOT_THE_MOD):
        return ""
    text = linecache.getline(file, line).strip()
    return f" at {Path(file).name}:{line}" + (f" `{text}`" if text else "")


# --- recording --------------------------------------------------------------------------------


def example_arguments(names: tuple[str, ...], device: str) -> list[Tensor]:
    """Return a one-element tensor for each argument of a mod.

    They are distinct objects, since the tracer identifies arguments by object. The score is
    float64, so that Python numbers are not rounded.
    """
    return [
        torch.full((1,), 0.5, dtype=torch.float64, device=device)
        if name == "score"
        else torch.zeros(1, dtype=torch.int64, device=device)
        for name in names
    ]


def record_operations(
    mod: Callable[..., Tensor], arguments: tuple[str, ...], examples: list[Tensor]
) -> fx.GraphModule:
    """Return the ATen operations that ``mod`` applies to ``examples``, with lines in PLACE.

    Raises:
        TraceError: if the mod cannot be called with ``arguments``, raises, writes in place, draws
            random numbers or reads a tensor's value.
    """
    if not callable(mod):
        raise TraceError(f"it is no callable of ({', '.join(arguments)})")
    try:
        inspect.signature(mod).bind(*arguments)
    except TypeError as error:
        raise TraceError(f"it must take ({', '.join(arguments)}): {error}") from None
    except ValueError:
        pass  # a built-in function has no signature: wrong arguments raise when it is called

    def watched(*tensors: Tensor) -> Tensor:
        return _call_watched(mod, tensors)

    with torch.no_grad():
        return _make_graph(watched, examples)


def record_gradient(mod: Callable[..., Tensor], examples: list[Tensor]) -> fx.GraphModule:
    """Return the ATen operations of torch's derivative of ``mod`` by its first argument.

    They are autograd's, decomposed by ``core_aten_decompositions``; some write in place.

    Raises:
        TraceError: as ``record_operations``, or if torch has no derivative of an operation.
    """

    def gradient(first: Tensor, *others: Tensor) -> Tensor:
        with torch.enable_grad():
            variable = first.detach().requires_grad_()
            result = _call_watched(mod, (variable, *others))
            if not result.requires_grad:  # it does not depend on its first argument
                return torch.zeros_like(first)
            ones = torch.ones_like(result)
            (slope,) = torch.autograd.grad(result, variable, ones, allow_unused=True)
        return torch.zeros_like(first) if slope is None else slope

    return _make_graph(gradient, examples, _decompositions())


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's table as a plain dict: its own searches all operators at each use, 0.1 s."""
    table = core_aten_decompositions()
    return dict(table.items())  # type: ignore[no-untyped-call]  # torch leaves it untyped


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """Return one mode for all; torch would create one per operation, each with a stack trace."""
    with no_garbage_collection():
        import_module("torch._dynamo")  # the mode would import it
    return FakeTensorMode(allow_fallback_kernels=True)


def _make_graph(
    function: Callable[..., Tensor], examples: list[Tensor], decompositions: Any = None
) -> fx.GraphModule:
    try:
        with tracing(TracingContext(_fake_mode())):
            return make_fx(function, decomposition_table=decompositions)(*examples)
    except (TraceError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  (somebody's code: SystemExit, too)
        raise TraceError(f"it raised {error_line(error)}{failing_mod_line(error)}") from None


def _call_watched(mod: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
    with _Watch(tensors) as watch, _NoEscape(watch):
        result: Any = mod(*tensors)
    if inspect.iscoroutine(result):
        result.close()  # Python warns about one that is neither run nor closed
        raise TraceError("it gives a coroutine: use a plain def")
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TraceError("it gives a generator: use a plain def without yield")
    return result  # type: ignore[no-any-return]  # whatever it is, the caller looks at it


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Refuses operations that no expression can represent, and records the line of each other one.

    It tracks which tensors depend on the mod's arguments; all others are constants of the mod, and
    their values may be read.
    """

    def __init__(self, arguments: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._dependent = {id(argument): argument for argument in arguments}

    def depends(self, values: Any) -> bool:
        """Return whether a tensor among ``values`` was computed from the mod's arguments."""
        return any(id(leaf) in self._dependent for leaf in tree_leaves(values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = current_mod_line()
        depends = self.depends((args, kwargs))
        gives_tensors = all("Tensor" in str(value.type) for value in func._schema.returns)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TraceError(f"it draws random numbers{place}: capture them instead")
        if func._schema.is_mutable:
            raise TraceError(
                f"it writes in place with {func.overloadpacket}{place}: "
                "give a new tensor (x = x + y, not x += y)"
            )
        if not gives_tensors:
            if depends:
                raise TraceError(f"it decides on a tensor's value{place}: {_VALUE_REMEDY}")
            with disable_proxy_modes_tracing():
                return func(*args, **kwargs)
        result = _call_marked(func, args, kwargs, place)
        if depends:
            self._dependent |= {id(leaf): leaf for leaf in tree_leaves(result)}
        return result


class _NoEscape(TorchFunctionMode):
    """Refuses functions that read a tensor's memory without the dispatcher."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS_MEMORY and self._watch.depends((args, kwargs)):
            place = current_mod_line()
            raise TraceError(f"it decides on a tensor's value{place}: {_VALUE_REMEDY}")
        return func(*args, **kwargs)


_READS_MEMORY = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_VALUE_REMEDY = "use torch.where for a choice, torch's functions in place of Python's"


def _call_marked(func: Any, args: Any, kwargs: Any, place: str) -> Any:
    """Call ``func``; the nodes that the tracer records for it get ``place``."""
    mode = get_proxy_mode()
    nodes: Any = mode.tracer.graph.nodes if mode is not None else []
    last = next(iter(reversed(nodes)), None)
    result = func(*args, **kwargs)
    for node in reversed(nodes):
        if node is last:
            break
        node.meta[PLACE] = place
    return result


# --- running recorded operations --------------------------------------------------------------


def aten_name(node: fx.Node) -> str:
    """Return a recorded operation's name without namespace and overload; "" of any other node."""
    target: Any = node.target
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else ""


class VocabularyInterpreter(fx.Interpreter):
    """Runs recorded operations, with replacements of those outside the vocabulary.

    These are writes in place and some powers. Factors of 1, with which every derivative by autograd
    begins, and terms of 0 are left out, so that kernels need not compute them.
    """

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation, as torch's own interpreter calls it."""
        target: Any = n.target
        args: tuple[Any, ...] = n.args
        name = aten_name(n)
        neutral = {"mul": 1.0, "add": 0.0}.get(name)
        if neutral is not None and len(args) == 2 and not n.kwargs:
            for one, other in (args, args[::-1]):
                if _constant(one) == neutral and _same_dtype(n, other):
                    return self.env[other]
        if name == "pow" and args[1] in _POWERS:
            return _POWERS[args[1]](self.env[args[0]])
        if name.endswith("_") and target._schema.is_mutable:
            # Later reads of the tensor get the value that would have been written.
            values, kwargs = self.fetch_args_kwargs_from_env(n)
            if name == "copy_":
                value = values[1].to(values[0].dtype)
            else:
                function = getattr(torch.ops.aten, name.removesuffix("_"))
                value = getattr(function, target._overloadname)(*values, **kwargs)
            self.env[args[0]] = value
            return value
        return super().run_node(n)


_POWERS: dict[float, Callable[[Tensor], Tensor]] = {
    0: torch.ones_like,
    -3: lambda x: torch.reciprocal(x * x * x),
    -1.5: lambda x: torch.reciprocal(x * torch.sqrt(x)),
}
"""x^(n − 1), of the derivative of x^n, where n is in the vocabulary and n − 1 is not."""


def _constant(value: Any) -> float | None:
    """Return the number that a tensor was filled with, or a number itself; else None."""
    if isinstance(value, fx.Node):
        filled = value.target is torch.ops.aten.full_like.default
        value = value.args[1] if filled else None
    return value if isinstance(value, int | float) else None


def _same_dtype(node: fx.Node, operand: Any) -> bool:
    return isinstance(operand, fx.Node) and operand.meta["val"].dtype == node.meta["val"].dtype

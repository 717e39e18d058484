"""Putting the interpreter's builtins into ``triton.language`` once a launch, and taking them out.

The stock interpreter looks through the whole language again at every call of a jit function inside
a kernel, and does not take back what it finds there. Here the changes are found once a process and
are set and unset around a launch, whatever happens in it.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.kernels.interpreter.operands import operand_methods
from attncheck.kernels.interpreter.plans import forget_plans
from attncheck.kernels.interpreter.repair import Repair
from attncheck.kernels.interpreter.shortcuts import shortcuts
from attncheck.kernels.interpreter.types import forget, type_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncheck.kernels.interpreter.repair import Stock

__all__ = ["LAUNCHES"]


class _Language:
    """``triton.language`` with the interpreter's builtins, while a launch runs."""

    def __init__(self, interp: Any, record: Callable[[Any], Any]) -> None:
        self._interp = interp
        self._record = record
        self._changes: list[tuple[Any, str, Any, Any]] | None = None
        self.active = False

    def _find_changes(self) -> list[tuple[Any, str, Any, Any]]:
        tl = self._interp.tl
        scope = self._record(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        changes = [(o, name, old, getattr(o, name)) for o, name, old in scope._changes]
        scope.restore()
        # 3.6 asks int() of an array of one element for a loop bound; numpy 2.4 refuses that.
        changes = [(o, n, old, _index if n == "__index__" else new) for o, n, old, new in changes]
        short = shortcuts(self._interp)
        return [(o, n, old, short(o, n, new)) for o, n, old, new in changes]

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        if self._changes is None:
            self._changes = self._find_changes()
        self.active = True
        try:
            for owner, name, _, new in self._changes:
                setattr(owner, name, new)
            # inf - inf and the like are what kernels do; they make NaN here as on a GPU.
            with np.errstate(all="ignore"):
                yield
        finally:
            self.active = False
            if forget():
                forget_plans()
            for owner, name, old, _ in reversed(self._changes):
                if old is self._interp._MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)


def _index(tensor: Any) -> int:
    return int(tensor.handle.data.item())


def _dtype_function(_interp: Any, stock: Stock) -> dict[str, Any]:
    stock_np_dtype, np_dtypes = stock("_get_np_dtype"), dict[str, Any]()

    def _get_np_dtype(dtype: Any) -> Any:
        # The stock one makes its table anew at every call.
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = stock_np_dtype(dtype)
        return np_dtypes[name]

    return {"_get_np_dtype": _get_np_dtype}


def _patch_functions(interp: Any, _stock: Stock) -> dict[str, Any]:
    builtin_code = interp.tl.core.builtin(_index).__code__

    def _patch_attr(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        # The wrapper of a builtin only asks whether _semantic is given, and here it is.
        known = getattr(member, "__code__", None) is builtin_code
        target = member.__wrapped__ if known else member
        semantic = interp.interpreter_semantic

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return target(*args, **kwargs)

        scope.set_attr(owner, name, builtin)

    def _patch_lang(_fn: Any) -> Any:
        # The launch has done it already, for everything that a kernel can reach.
        return SimpleNamespace(restore=lambda: None)

    return {"_patch_attr": _patch_attr, "_patch_lang": _patch_lang}


def _launch_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    language = _Language(interp, stock("_patch_lang"))
    stock_launch = stock("GridExecutor.__call__")

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if language.active:  # a pre-run hook launched a kernel
            return stock_launch(self, *args, **kwargs)
        with language.patched():
            return stock_launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not language.active:  # a host called it outside a launch
            with language.patched():
                return call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except interp.InterpreterError:
            raise
        except Exception as error:
            raise interp.InterpreterError(repr(error)) from error

    return {"GridExecutor.__call__": launch, "InterpretedFunction.__call__": call}


LAUNCHES = Repair(
    description="faster launches without overflow checks",
    methods=(
        _dtype_function,
        _patch_functions,
        _launch_methods,
        type_methods,
        operand_methods,
    ),
    uses=(
        "InterpreterError",
        "InterpretedFunction.rewrite",
        "_LangPatchScope.set_attr",
        "_MISSING",
        "interpreter_semantic",
        "tl.core.builtin",
        "interpreter_builder.options.sanitize_overflow",
        "interpreter_semantic.cast",
        "interpreter_semantic.computation_type_impl",
        "interpreter_semantic.scalar_constant",
        "tl.core.constexpr",
    ),
)

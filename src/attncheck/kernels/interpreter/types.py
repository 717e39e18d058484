"""Types of the interpreter, each made once; most of an operation's time went into them.

Every operation names the type of its result, of its operands once they are spread, and for each the
shape again as a tuple of constants. A kernel has a few dozen types and tens of thousands of
operations, and the next launch has the same ones: pointers of one dtype are of one type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from attncheck.kernels.interpreter.repair import Stock

__all__ = ["forget", "type_methods"]

# A block type holds its element type: as long as it is here, no other object has that id.
_BLOCKS: dict[tuple[int, ...], Any] = {}
_MOST = 4096
_INT32 = 2**31


def forget() -> bool:
    """Whether there were so many types that all were forgotten: a kernel made pointer types."""
    many = len(_BLOCKS) > _MOST
    if many:
        _BLOCKS.clear()
    return many


def type_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    """``block_type`` and ``tensor`` of ``triton.language.core``, and what IR calls a type."""
    core = interp.tl.core
    block_type, constexpr = core.block_type, core.constexpr
    stock_block, stock_ir = stock("tl.core.block_type.__init__"), stock("tl.core.block_type.to_ir")
    ranked = (list, core.tuple)
    of_scalars = core.tuple([]), constexpr(1)

    def _block(cls: Any, *given: Any, **named: Any) -> Any:
        if cls is not block_type or named or len(given) != 2 or type(given[1]) not in ranked:
            return object.__new__(cls)
        element, shape = given
        lengths = [length.value if type(length) is constexpr else length for length in shape]
        if {*map(type, lengths)} != {int}:  # 2.0 would find what 2 has made, and is refused
            return object.__new__(cls)
        key = (id(element), *lengths)
        found = _BLOCKS.get(key)
        if found is None:
            found = _BLOCKS[key] = _made(element, shape)
        return found

    def _made(element: Any, shape: Any) -> Any:
        made = object.__new__(block_type)
        stock_block(made, element, shape)
        lengths = core.tuple([constexpr(length) for length in made.shape])
        made.of_tensors = lengths, constexpr(made.numel)
        return made

    def _init_block(self: Any, *given: Any, **named: Any) -> None:
        if "of_tensors" not in self.__dict__:
            stock_block(self, *given, **named)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        siblings = self.__dict__.setdefault("siblings", {})
        if id(scalar_ty) not in siblings:
            siblings[id(scalar_ty)] = block_type(scalar_ty, self.shape)
        return siblings[id(scalar_ty)]

    def to_ir(self: Any, builder: Any) -> Any:
        known = self.__dict__.get("in_ir")
        if known is None or builder is not interp.interpreter_builder:
            known = stock_ir(self, builder)
            if builder is interp.interpreter_builder:
                self.in_ir = known
        return known

    stock_tensor = stock("tl.core.tensor.__init__")

    def _init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  (its own signature)
        known = type.__dict__.get("of_tensors") if type.is_block() else of_scalars
        if known is None:
            stock_tensor(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    stock_argument = stock("_implicit_cvt")
    of_pointers: dict[tuple[type, Any], Any] = {}

    def _implicit_cvt(arg: Any) -> Any:
        if type(arg) is int and -_INT32 <= arg < _INT32:
            handle = interp.TensorHandle(np.array([arg], np.int32), core.int32)
            return core.tensor(handle, core.int32)
        if not hasattr(arg, "data_ptr"):
            return stock_argument(arg)
        key = type(arg), arg.dtype
        if key not in of_pointers:
            of_pointers[key] = stock_argument(arg).type
        kind = of_pointers[key]
        handle = interp.TensorHandle(np.array([arg.data_ptr()], np.uint64), kind)
        return core.tensor(handle, kind)

    return {
        "_implicit_cvt": _implicit_cvt,
        "tl.core.block_type.__new__": staticmethod(_block),
        "tl.core.block_type.__init__": _init_block,
        "tl.core.block_type.with_element_ty": with_element_ty,
        "tl.core.block_type.to_ir": to_ir,
        "tl.core.tensor.__init__": _init_tensor,
    }

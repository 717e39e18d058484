"""``x[:, None]``, ``x.to``, ``tl.where``, ``tl.load``: straight where ``plans`` has an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.kernels.interpreter.plans import BOOLEAN, REAL, WHOLE, is_usual, plans

if TYPE_CHECKING:
    from attncheck.kernels.interpreter.plans import Types

__all__ = ["indexed", "loaded", "selected", "to_dtype"]

_EVERY = slice(None)


def indexed(types: Types, stock: Any) -> Any:
    """In place of ``tensor.__getitem__``."""
    made, known = types.maker(), plans()

    def planned(kind: Any, new: tuple[bool, ...]) -> Any:
        if not kind.is_block() or new.count(False) != len(kind.shape):
            return None
        lengths = iter(kind.shape)
        shape = [1 if added else next(lengths) for added in new]
        return types.result(types.block(kind.scalar, shape), kind.scalar)

    def getitem(one: Any, slices: Any) -> Any:
        if slices.__class__ is not tuple or any(s is not None and s != _EVERY for s in slices):
            return stock(one, slices)
        key = id(one.type), tuple([s is None for s in slices])
        plan = known.get(key)
        if plan is None:
            plan = known[key] = planned(one.type, key[1]), one.type
        if plan[0] is None:
            return stock(one, slices)
        return made(one.handle.data[slices], *plan[0])

    return getitem


def to_dtype(types: Types, stock: Any) -> Any:
    """In place of ``tensor.to``."""
    made, known = types.maker(), plans()

    def planned(kind: Any, dtype: Any) -> Any:
        source, target = kind.scalar.name, dtype.scalar.name
        exact = source in {BOOLEAN, *WHOLE} and target in WHOLE | REAL
        rounds = source in REAL and target in REAL  # to nearest, as numpy does
        result = types.result(kind, dtype.scalar) if exact or rounds else None
        return None if result is None else (types.cast(kind.scalar, dtype.scalar), result)

    def to(one: Any, dtype: Any, *more: Any, **named: Any) -> Any:
        key = id(one.type), id(dtype)
        plan = known.get(key)
        if plan is None:
            scalar = hasattr(dtype, "scalar")
            plan = known[key] = planned(one.type, dtype) if scalar else None, one.type, dtype
        if plan[0] is None or more or named:
            return stock(one, dtype, *more, **named)
        cast, result = plan[0]
        return one if cast is None else made(one.handle.data.astype(cast), *result)

    return to


def selected(types: Types, stock: Any) -> Any:
    """In place of ``tl.where``."""
    tensor, made, known = types.tensor, types.maker(), plans()

    def planned(condition: Any, x: Any, y: Any) -> Any:
        tensors = [kind for kind in (x, y) if not isinstance(kind, type)]
        if condition.scalar.name != BOOLEAN or not tensors:
            return None
        scalar = tensors[0].scalar
        if scalar.name not in REAL or any(kind.scalar is not scalar for kind in tensors):
            return None
        if any(kind not in (float, int) for kind in (x, y) if isinstance(kind, type)):
            return None
        shape = condition
        for kind in tensors:
            shape = types.spread(shape, kind)
        result = types.result(shape, scalar)
        return None if result is None else (types.numbers(scalar).type, result)

    def where(condition: Any, x: Any, y: Any) -> Any:
        if condition.__class__ is not tensor:
            return stock(condition, x, y)
        of_x, of_y = (v.type if v.__class__ is tensor else v.__class__ for v in (x, y))
        key = id(condition.type), id(of_x), id(of_y)
        plan = known.get(key)
        if plan is None:
            plan = known[key] = planned(condition.type, of_x, of_y), condition.type, of_x, of_y
        if plan[0] is None or not all(v.__class__ is tensor or is_usual(v) for v in (x, y)):
            return stock(condition, x, y)
        number, result = plan[0]
        a, b = (v.handle.data if v.__class__ is tensor else number(v) for v in (x, y))
        return made(np.where(condition.handle.data, a, b), *result)

    return where


def loaded(types: Types, stock: Any, load_array: Any) -> Any:
    """In place of ``tl.load``, with a mask, and 0 or nothing where it hides."""
    tensor, made, known = types.tensor, types.maker(), plans()

    def planned(pointer: Any, mask: Any) -> Any:
        if not pointer.scalar.is_ptr() or mask.scalar.name != BOOLEAN:
            return None
        element = pointer.scalar.element_ty
        shape = types.spread(mask, pointer)
        if shape is None or element.name == BOOLEAN or pointer.is_block() != shape.is_block():
            return None
        lengths = tuple(pointer.shape) if pointer.is_block() else (1,)
        if pointer.is_block() and tuple(shape.shape) != lengths:
            return None
        result = types.result(pointer, element)
        return None if result is None else (types.numbers(element), lengths, result)

    def load(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
        if named or mask.__class__ is not tensor or not _is_nothing(other):
            return stock(pointer, mask, other, **named)
        key = id(pointer.type), id(mask.type)
        plan = known.get(key)
        if plan is None:
            plan = known[key] = planned(pointer.type, mask.type), pointer.type, mask.type
        if plan[0] is None:
            return stock(pointer, mask, other)
        dtype, lengths, result = plan[0]
        shown = mask.handle.data
        if shown.shape != lengths:
            shown = np.broadcast_to(shown, lengths)
        return made(
            load_array(pointer.handle.data, shown, np.zeros(lengths, dtype), dtype), *result
        )

    return load


def _is_nothing(other: Any) -> bool:
    """Whether all bits of it are 0: −0.0 is another number."""
    return other is None or (other.__class__ in (int, float) and repr(other) in {"0", "0.0"})

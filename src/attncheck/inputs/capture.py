"""``attncheck.capture``: recording of a model's scaled_dot_product_attention calls."""

from __future__ import annotations

import contextlib
import math
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from attncheck.core.errors import UsageError
from attncheck.core.formats import FORMATS
from attncheck.inputs.recorded_calls import DTYPES, Call
from attncheck.inputs.recording_file import (
    call_fact,
    draft,
    tensor_fact,
    write_calls,
    write_error,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from attncheck.inputs.recorded_calls import Dtype, MaskKind

# torch's own function, even if torch.nn.functional's has been replaced by one that calls it.
_SDPA = torch._C._nn.scaled_dot_product_attention
_NAME = "scaled_dot_product_attention"


@contextlib.contextmanager
def capture(
    file: str | os.PathLike[str], *, model: nn.Module | None = None, calls: int | None = None
) -> Iterator[None]:
    """Record every call of ``scaled_dot_product_attention`` inside the ``with`` to a file.

    >>> with attncheck.capture("trained.safetensors", model=model):  # doctest: +SKIP
    ...     model(batch)

    Of each call q, k, v, the mask (bool, additive, or is_causal), the scale and the effect of
    enable_gqa are recorded, as described in ``inputs.recorded_calls``: copies on the CPU in the
    dtype that the kernel reads (under autocast the one cast to), as (batch, heads, length, dim).
    ``attncheck rmse --inputs FILE`` and ``inputs.recording_file.load`` read the file.

    Calls are recorded however a module imported the function, including those by
    ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``. In eval mode those two have a fast
    path that does not call scaled_dot_product_attention; it is switched off inside the ``with``
    (``torch.backends.mha.set_fastpath_enabled``), so that they compute by the ordinary path. All
    other results are unchanged. ``nn.MultiheadAttention`` with need_weights (its default) computes
    its scores itself and never calls the function. Calls in another thread, in TorchScript and of
    FlexAttention are not recorded. Capture a model before torch.compile: a compiled model would be
    compiled again.

    A call that attncheck cannot represent (float64, nested or fake tensors, a size of 0, head_dim
    above 256, a scale that is not positive, NaN or an infinity in q, k or v …) is left out with one
    warning for each reason. Dropout is recorded, and ignored when a kernel is judged.

    The file is written at the end, in one step, and replaces an old one. If the ``with`` ends with
    an exception, it is written with the calls up to then.

    Args:
        file: Path of the file, usually ``NAME.safetensors``.
        model: Model whose modules name the calls, ``blocks.0.attention/0`` for a module's first
            call; without it names are ``call-0``, ``call-1``, ….
        calls: Number of calls to record (default: all; they stay in memory until the end).

    Raises:
        UsageError: at the beginning, if the file cannot be written; at the end, if no call was
            recorded.
    """
    path = _check_writable(file)
    # bool is an int: True would mean one call.
    if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int) or calls < 1):
        raise UsageError(f"calls={calls!r} must be a whole number of at least 1.")
    modules = _Modules(model)
    recorder = _Recorder(modules, calls)
    try:
        # The recorder is entered last, so that it does not see the hooks being registered.
        with _no_fast_path(), modules, recorder:
            yield
    except BaseException as error:
        if recorder.recorded_calls:
            try:
                write_calls(path, recorder.recorded_calls)
            except UsageError as write_error:
                error.add_note(str(write_error))
        raise
    if not recorder.recorded_calls:
        raise UsageError(
            f"capture saw no call of {_NAME} that it could keep: {str(path)!r} is not written."
        )
    write_calls(path, recorder.recorded_calls)


class _Modules:
    """Context in which hooks track a model's running modules, to name calls."""

    def __init__(self, model: nn.Module | None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise UsageError(f"model is {type(model).__name__}: it must be a torch.nn.Module.")
        self._model = model
        self._running: list[str] = []
        self._calls: Counter[str] = Counter()
        self._handles = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._model is not None:
            for path, module in self._model.named_modules():
                self._watch(path or type(module).__name__, module)

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def _watch(self, path: str, module: nn.Module) -> None:
        def enter(*_: object) -> None:
            self._running.append(path)

        def leave(*_: object) -> None:
            self._running.pop()

        for handle in (
            module.register_forward_pre_hook(enter, prepend=True),
            # Called even if the module raises, since names of later calls depend on it.
            module.register_forward_hook(leave, always_call=True),
        ):
            self._handles.callback(handle.remove)

    def name(self) -> str:
        """Return the name of the current call."""
        module = self._running[-1] if self._running else ""
        number = self._calls[module]
        self._calls[module] += 1
        return f"{module}/{number}" if module else f"call-{number}"


class _Recorder(TorchFunctionMode):
    """Mode that torch calls for each of its functions called from Python; records attention."""

    def __init__(self, modules: _Modules, most: int | None) -> None:
        super().__init__()
        self.recorded_calls: list[tuple[Call, dict[str, Tensor]]] = []
        self._modules = modules
        self._most = most
        self._warned: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not _SDPA:
            return self._make_listening(func)(*args, **kwargs)
        out = func(*args, **kwargs)
        name = self._modules.name()
        if self._most is None or len(self.recorded_calls) < self._most:
            self._record(name, out, args, kwargs)
        return out

    def _record(
        self, name: str, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            self.recorded_calls.append(_record_call(name, _Arguments(*args, **kwargs), out))
        except _Unfit as error:
            reason = str(error).rstrip(".")
            # A model of a hundred layers would repeat the warning a hundred times.
            if reason not in self._warned:
                self._warned.add(reason)
                printable = name if name.isprintable() else repr(name)
                warnings.warn(f"capture leaves out {printable}: {reason}.", stacklevel=2)

    def _make_listening(self, func: Any) -> Any:
        """Return ``func``, or a copy whose calls of the attention function reach this mode.

        torch runs Python functions that modes may override, as multi_head_attention_forward, with
        the mode disabled. Since such a function passes itself to modes, the copy replaces its own
        name, so that other modes call the copy too.
        """
        if not isinstance(func, FunctionType) or _NAME not in func.__code__.co_names:
            return func
        original: Callable[..., Tensor] = func.__globals__.get(_NAME, _SDPA)

        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            with self:
                return original(*args, **kwargs)

        listening = FunctionType(
            func.__code__,
            func.__globals__ | {_NAME: recorded},
            func.__name__,
            func.__defaults__,
            func.__closure__,
        )
        listening.__kwdefaults__ = func.__kwdefaults__
        listening.__globals__[func.__name__] = listening
        return listening


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    # The fast path of nn.MultiheadAttention is one C++ call, inside which no mode is called.
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


class _Unfit(Exception):
    """Raised for a call that a recording cannot hold, with the reason as its text."""


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Parameters of scaled_dot_product_attention, in torch's order and with torch's names."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _record_call(name: str, args: _Arguments, out: Tensor) -> tuple[Call, dict[str, Tensor]]:
    """Return the call and copies of its tensors q, k, v and mask (if there is one) on the CPU.

    Args:
        out: The call's result. Under autocast its dtype is the one that q, k and v were cast to.

    Raises:
        _Unfit: for tensors that a recording cannot hold or that its reader would reject.
    """
    kind, mask = _mask(args)
    tensors = [args.query, args.key, args.value] + ([] if mask is None else [mask])
    for tensor in tensors:
        _refuse(_oddity(tensor))
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    if any(0 in tensor.shape for tensor in tensors):
        raise _Unfit(f"shapes {shapes} have a size of 0")
    dtypes = [name for name in DTYPES if FORMATS[name].torch_dtype == out.dtype]
    if not dtypes:
        raise _Unfit(f"{out.dtype} is not one of {', '.join(DTYPES)}")
    other_shapes = f"shapes {shapes} are not those of (batch, heads, length, dim)"
    try:
        q, k, v, mask = _four_axes(args.query, args.key, args.value, mask, gqa=args.enable_gqa)
    except RuntimeError:
        raise _Unfit(other_shapes) from None
    call = Call(
        name=name,
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        query=q.shape[2],
        kv=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=cast("Dtype", dtypes[0]),
        mask=kind,
        scale=None if args.scale is None else float(args.scale),
        dropout=float(args.dropout_p),
    )
    _refuse(call_fact(call))
    _refuse(other_shapes if out.numel() != q[..., 0].numel() * v.shape[3] else None)
    # Autocast casts an additive mask too.
    cast_mask = mask is not None and mask.is_floating_point() and args.query.dtype != out.dtype
    copy_dtypes = [out.dtype] * 3 + [out.dtype if cast_mask or mask is None else mask.dtype]
    copies = {
        part: tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        for part, tensor, dtype in zip(
            ("q", "k", "v", "mask"), (q, k, v, mask), copy_dtypes, strict=True
        )
        if tensor is not None
    }
    for part, tensor in copies.items():
        _refuse(tensor_fact(call, part, tensor))
    return call, copies


def _refuse(fact: str | None) -> None:
    if fact is not None:
        raise _Unfit(fact)


def _mask(args: _Arguments) -> tuple[MaskKind, Tensor | None]:
    mask = args.attn_mask
    if isinstance(mask, CausalBias):
        top_left = mask.variant == CausalVariant.UPPER_LEFT
        return ("causal" if top_left else "causal_bottom_right"), None
    if mask is None:
        return ("causal" if args.is_causal else "none"), None
    return ("bool" if mask.dtype is torch.bool else "additive"), mask


def _oddity(tensor: Tensor) -> str | None:
    if tensor.is_nested:
        return "nested tensors have sequences of several lengths: pad them"
    if type(tensor) not in {Tensor, torch.nn.Parameter}:
        return f"{type(tensor).__name__} is not a plain tensor"
    if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor on meta or under vmap or grad has no numbers to copy"
    return None


def _four_axes(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v and mask with four axes, ``(batch, heads, length, dim)``, as torch reads them.

    Two axes are one head of one sequence, three are heads of one sequence, and axes before the
    heads are folded into the batch. Axes of 1 that torch broadcasts are expanded, except heads that
    k and v share (few key heads for many query heads), and except the mask's axes, which have the
    scores' sizes or 1.

    Raises RuntimeError for shapes that do not match.
    """
    # A tensor without heads gets an axis in front.
    q, k, v = (tensor if tensor.dim() > 2 else tensor.unsqueeze(0) for tensor in (q, k, v))
    leading_axes = (tensor.shape[:-3] for tensor in (q, k, v))
    batch_axes: tuple[int, ...] = tuple(torch.broadcast_shapes(*leading_axes))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    batch = math.prod(batch_axes)
    of_q, of_k, of_v = (tensor.shape[-3] for tensor in (q, k, v))
    heads = of_q if gqa else max(of_q, of_k, of_v)
    kv_heads = of_k if of_k == of_v else heads

    def fold(tensor: Tensor, heads: int) -> Tensor:
        repeated = tensor.repeat_interleave(heads // tensor.shape[-3], dim=-3)
        expanded = repeated.expand(*batch_axes, heads, -1, -1)
        return expanded.reshape(batch, *expanded.shape[-3:])

    if mask is not None:
        mask = mask[(None,) * (len(batch_axes) + 3 - mask.dim())]  # missing axes are in front
        if math.prod(mask.shape[:-3]) == 1:
            mask = mask.reshape(1, *mask.shape[-3:])
        else:
            mask = mask.expand(*batch_axes, -1, -1, -1).reshape(batch, *mask.shape[-3:])
    return fold(q, heads), fold(k, kv_heads), fold(v, kv_heads), mask


def _check_writable(file: str | os.PathLike[str]) -> Path:
    """Return the path if a file can be written there; checked first as a model may run for long."""
    try:
        path = Path(file)
    except TypeError:
        raise UsageError(f"file is {type(file).__name__}: it must be a path.") from None
    try:
        str(path).encode()  # safetensors takes nothing else
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        with contextlib.suppress(FileNotFoundError):
            draft(path).lstat()  # raises for a name that no file can have
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except (OSError, ValueError) as error:
        raise write_error(path, error) from None

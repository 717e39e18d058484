"""Loads kernels from a folder in the format of Hugging Face's kernels hub.

Modules are ``FOLDER/build/VARIANT/__init__.py``, or ``FOLDER/build/VARIANT/NAME/__init__.py`` in
older folders, where VARIANT names the build's platform, such as
``torch210-cxx11-cu128-x86_64-linux`` or ``torch-universal``:
https://huggingface.co/docs/kernels/kernel-requirements. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import platform
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import UsageError
from attncheck.core.source_files import import_file, load_attribute

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_NOARCH = re.compile(r"torch-([a-z]+)")
_BUILT = re.compile(
    r"torch(?:-stable-abi(?P<abi>\d{2,})|(?P<torch>\d{2,})(?:-(?P<cxx>cxx11|cxx98))?)"
    r"-(?P<backend>[a-z]+)(?P<version>\d*)-(?P<system>\w+-\w+)"
)
_MOST_NAMED = 6  # variants listed in an error


def is_hub_folder(text: str) -> bool:
    """Return whether ``text`` is a folder with builds of a kernel."""
    try:
        return any(map(_is_variant, Path(text, "build").iterdir()))
    except (OSError, ValueError):  # not a folder, or not a valid file name
        return False


def _is_variant(path: Path) -> bool:
    return bool(_NOARCH.fullmatch(path.name) or _BUILT.fullmatch(path.name)) and path.is_dir()


def load_hub_kernel(kernel: str, what: str) -> Any:
    """Return the function of ``FOLDER::NAME``; for ``FOLDER``, the only one or ``flash_attn_func``.

    A function of transformers' attention interface (module, query, key, value, attention_mask, …)
    is wrapped in one like flash-attn's, with windows, softcap and sinks if the function has
    ``sliding_window``, ``softcap`` and ``s_aux``.

    Raises:
        UsageError: in one line, if no variant fits this machine, there is no such function, or
            importing it raises anything but KeyboardInterrupt.
    """
    folder, _, name = kernel.partition("::")
    path = _variant(Path(folder), what) / "__init__.py"
    if not path.is_file():  # an older folder
        path = next(path.parent.glob("*/__init__.py"), path)
    module = import_file(path, what)
    function = load_attribute(module, path, name or _usual_name(module, folder, what), what)
    # Only functions, because signatures of other objects may be unreadable.
    parameters = inspect.signature(function).parameters if inspect.isfunction(function) else {}
    if next(iter(parameters), "") != "module":
        return function
    return _like_flash_attn(function, parameters, tables=hasattr(module, "supports_flash_attn"))


def _variant(folder: Path, what: str) -> Path:
    """Return the folder of the most specific variant for this machine."""
    import torch

    cuda = torch.version.cuda if torch.cuda.is_available() else None
    system = f"{platform.machine()}-{platform.system().lower()}"
    variants = sorted(filter(_is_variant, (folder / "build").iterdir()))
    fits = [(_rank(each.name, cuda, system), each) for each in variants]
    rank, best = max(fits, default=((), folder))
    if rank:
        return best
    names = ", ".join(each.name for each in variants[:_MOST_NAMED])
    more = f" and {len(variants) - _MOST_NAMED} more" if len(variants) > _MOST_NAMED else ""
    here = f"torch {torch.__version__}, {f'CUDA {cuda}' if cuda else 'CPU'}, {system}"
    raise UsageError(f"{what}: no build is for this machine ({here}): {names}{more}.")


def _rank(variant: str, cuda: str | None, system: str) -> tuple[int, ...]:
    """Return a variant's specificity for sorting; empty if it does not fit this machine."""
    import torch

    backend = "cuda" if cuda else "cpu"
    if noarch := _NOARCH.fullmatch(variant):
        return {"universal": (1,), backend: (2,)}.get(noarch[1], ())
    built = _BUILT.fullmatch(variant)
    if built is None or built["system"] != system:
        return ()
    here, required = _numbers(torch.__version__), _digits(built["abi"] or built["torch"])
    abi = "cxx11" if torch.compiled_with_cxx11_abi() else "cxx98"
    if (required > here) if built["abi"] else (required != here or built["cxx"] not in {None, abi}):
        return ()
    if cuda is None:
        minor = 0 if built["backend"] == "cpu" else -1
    else:
        (major, least), own = _digits(built["version"] or "00"), _numbers(cuda)
        minor = least if (built["backend"], major) == ("cu", own[0]) and least <= own[1] else -1
    return () if minor < 0 else (3 + bool(built["abi"]), *required, minor)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _digits(text: str) -> tuple[int, int]:
    """Split a version of ``_BUILT`` into major and minor: ``210`` is 2.10, ``128`` is 12.8."""
    split = 1 if text[0] in "23" else len(text) - 1
    return int(text[:split]), int(text[split:])


def _usual_name(module: ModuleType, folder: str, what: str) -> str:
    listed = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    names = [name for name in listed if inspect.isfunction(getattr(module, name, None))]
    preferred = [name for name in ("flash_attn_func", "flash_attn_forward") if name in names]
    if not preferred and len(names) != 1:
        raise UsageError(
            f"{what}: name its function, {folder}::NAME: {', '.join(names) or 'none'}."
        )
    return (preferred or names)[0]


def _like_flash_attn(
    function: Callable[..., Any], parameters: Any, *, tables: bool
) -> Callable[..., Tensor]:
    """Return a wrapper like ``flash_attn_func`` of a function of transformers' interface.

    Args:
        tables: Whether its masks are (batch, 1, query, kv), which are not passed, and not padding
            masks (batch, kv).
    """

    def flash_attn(  # noqa: PLR0913, PLR0917  # its keywords
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,  # noqa: FBT001, FBT002  # flash-attn's
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        left, right = window_size
        if right > 0 or (left >= 0 and right < 0 and not causal):
            raise ValueError("windows of transformers' interface are causal")
        module = SimpleNamespace(
            is_causal=causal or right == 0,
            training=False,
            layer_idx=0,
            num_key_value_groups=q.shape[2] // k.shape[2],
        )
        options = {
            "sliding_window": left + 1 if left >= 0 else None,
            "softcap": softcap or None,
            "s_aux": sinks,
            "is_causal": module.is_causal,
        }
        result = function(
            module,
            *(each.transpose(1, 2) for each in (q, k, v)),
            key_padding_mask,
            scaling=q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
            dropout=0.0,
            **{name: value for name, value in options.items() if name in parameters},
        )
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    signature = inspect.signature(flash_attn)
    aliases = {"window_size": "sliding_window", "softcap": "softcap", "sinks": "s_aux"}
    absent = {own for own, name in aliases.items() if name not in parameters}
    absent |= {"key_padding_mask"} if tables else set()
    present = [each for each in signature.parameters.values() if each.name not in absent]
    flash_attn.__signature__ = signature.replace(parameters=present)  # type: ignore[attr-defined]
    flash_attn.__wrapped__ = function  # type: ignore[attr-defined]  # its module may use Triton
    return flash_attn

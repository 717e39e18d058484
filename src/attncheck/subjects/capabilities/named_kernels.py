"""The built-in subjects by name; importing this module imports neither torch nor Triton."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from attncheck.core.errors import require_known
from attncheck.subjects.capabilities.subject import CompilerName, Subject


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """A Subject's class, imported only when a subject is created."""

    summary: str
    module: str
    name: str  # of the class
    arguments: tuple[str, ...] = ()  # of its constructor
    compiler: CompilerName = "triton"  # same as ``Subject.compiler``

    def __call__(self) -> Subject:
        """Return a new subject."""
        subject: Subject = getattr(importlib.import_module(self.module), self.name)(*self.arguments)
        return subject


# Modules are named as text because importing them takes a second, too long for listing summaries.
_FLASH = "attncheck.subjects.triton_flash"
_CACHES = "attncheck.subjects.triton_caches"
_TORCH = "attncheck.subjects.torch_kernels"
_SOFTMAX = "attncheck.subjects.softmax_kernels"

BUILTIN: dict[str, _BuiltIn] = {
    "triton-flash2": _BuiltIn(
        "our FlashAttention-2 forward in Triton, any mask and score mod", _FLASH, "Flash2"
    ),
    "triton-flash2-vt": _BuiltIn(
        "triton-flash2 in fp8, V stored transposed", _FLASH, "Flash2TransposedValues"
    ),
    "triton-flash2-fastacc": _BuiltIn(
        "triton-flash2 in fp8, sums in the tensor core's own accumulator (13 bits on Hopper)",
        _FLASH,
        "Flash2FastAccumulation",
    ),
    "triton-flash1": _BuiltIn(
        "our FlashAttention-1 forward in Triton (key blocks outermost), any mask and score",
        _FLASH,
        "Flash1",
    ),
    "triton-flash3": _BuiltIn(
        "our FlashAttention-3 for Hopper GPUs in Gluon, any mask and score mod",
        _FLASH,
        "Flash3",
    ),
    "triton-varlen": _BuiltIn(
        "our FlashAttention-2 of packed documents in Triton", _CACHES, "Varlen"
    ),
    "triton-paged": _BuiltIn(
        "triton-flash2 on keys and values in pages, behind a page table", _CACHES, "Paged"
    ),
    "triton-decode": _BuiltIn(
        "our decode kernel in Triton: up to 128 rows a kv head, keys in splits merged by LSE",
        _CACHES,
        "Decode",
    ),
    "ideal": _BuiltIn(
        "tiled FlashAttention-2 in fp32 torch operations, rounded where a kernel must round",
        "attncheck.subjects.ideal",
        "Ideal",
        compiler="",
    ),
    **{
        f"sdpa-{backend}": _BuiltIn(
            f"torch's scaled_dot_product_attention, {summary}; no LSE",
            _TORCH,
            "Sdpa",
            (backend,),
            compiler="cudnn" if backend == "cudnn" else "",
        )
        for backend, summary in {
            "math": "unfused: scores and weights in memory",
            "flash": "FlashAttention-2",
            "efficient": "memory-efficient attention (CUTLASS)",
            "cudnn": "cuDNN: rows that see no key hold anything",
        }.items()
    },
    "flex": _BuiltIn(
        "torch's flex_attention with the original mods: compiled on CUDA, eager on the CPU",
        _TORCH,
        "Flex",
        compiler="torch",
    ),
    **{
        f"triton-softmax-{kind}": _BuiltIn(
            f"our row softmax in Triton: {summary}", _SOFTMAX, "Softmax", (kind,)
        )
        for kind, summary in {
            "naive": "exp(x) over its sum",
            "safe": "a pass for the maximum, one for the sum",
            "online": "one pass for a running maximum and sum",
            "blocked": "online over tiles of rows and columns",
        }.items()
    },
    "torch-softmax": _BuiltIn(
        "torch.softmax in the input's dtype; no LSE", _SOFTMAX, "TorchSoftmax", compiler=""
    ),
}


def builtin_names() -> tuple[str, ...]:
    """Return the names of the built-in subjects, in the order of listings."""
    return tuple(BUILTIN)


def subject_named(name: str) -> Subject:
    """Return a new subject called ``name``; raises UnknownName if there is none."""
    require_known("kernel", [name], BUILTIN)
    return BUILTIN[name]()

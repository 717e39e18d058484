"""torch's attention functions as subjects: SDPA's backends and FlexAttention."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.formats import FORMATS, Format
from attncheck.core.mod_spec import FULL, NONE
from attncheck.core.outputs import Outputs
from attncheck.core.own_process import no_garbage_collection
from attncheck.core.source_files import error_line
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods import library
from attncheck.mods.captured_gradients import captured_tensors
from attncheck.mods.signatures import ScoreMod
from attncheck.subjects.capabilities.named_kernels import BUILTIN
from attncheck.subjects.capabilities.subject import (
    Call,
    CompilerName,
    Refused,
    Subject,
    memory_refusal,
    with_full_tanh,
)
from attncheck.subjects.conventions import call_tensors, torch_arithmetic
from attncheck.subjects.conventions.empty_rows import empty_rows, settle_empty_rows
from attncheck.subjects.conventions.torch_conventions import (
    flex_block_mask,
    flex_score_mod,
    uncompiled_flex,
)

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_ON_THE_CPU = ("math", "flash")
# Backends that need aligned tensors. On an H200 (torch 2.11) flash accepts misaligned ones, and its
# misaligned address then makes the GPU unusable in this process. The efficient backend raises in
# the call; cuDNN's behaviour is not documented.
_NEED_ALIGNMENT = ("flash", "efficient", "cudnn")
_VECTOR = 16  # bytes to which they must be aligned


class Sdpa(Subject):
    """``F.scaled_dot_product_attention`` with a fixed backend; no LSE. Gradients are autograd's.

    The mask is passed as ``is_causal`` if it is causal (torch aligns it top-left), not at all if
    every key is visible, else as a boolean ``attn_mask``. An additive score mod becomes a
    floating-point ``attn_mask``, if the cast to its dtype is exact.

    Args:
        backend: ``math``, ``flash``, ``efficient`` or ``cudnn``.
    """

    backward = True

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._kernel = _BACKENDS[backend]
        self.name = f"sdpa-{backend}"
        self.summary = BUILTIN[self.name].summary

    @property
    def compiler(self) -> CompilerName:
        """Return cuDNN's, which takes half a second per kernel; other backends have none."""
        return "cudnn" if self._backend == "cudnn" else ""

    def absent(self, device: str) -> str | None:
        """Return why it cannot run: a CPU has only the math and flash backends."""
        if device == "cpu" and self._backend not in _ON_THE_CPU:
            return "needs a CUDA GPU"
        return None

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why it is refused: the score mod is not additive, or by torch's own rules."""
        return (
            self.absent(device)
            or ("takes no fp8 inputs with descales" if problem.formats.scaled else None)
            or ("it gives no LSE, of which the loss is a function" if problem.dlse else None)
            or self._unsupported_products(problem, device)
            or self._unsupported_size(problem, device)
            or self._unsupported_score(problem, device)
            or self._torch_refusal(problem, device)
        )

    def prepare(self, inputs: Inputs) -> Call:
        """Make an ``attn_mask`` of mask and bias if they need one, and return the call.

        Raises Refused if torch does not support the tensors' strides or alignment.
        """
        problem, device = inputs.problem, str(inputs.q.device)
        mask = self._mask(problem, device)
        arguments = _arguments(problem)
        dead = self._garbage(problem, device)  # these rows are not judged and not in the loss
        tensors = (inputs.q, inputs.k, inputs.v)
        if self._backend in _NEED_ALIGNMENT and device != "cpu" and not _aligned(tensors):
            raise Refused("it reads 16 bytes at a time, and its inputs do not begin at 16 bytes")
        # ``unsupported`` has already checked contiguous tensors.
        if self._backend != "math" and not all(tensor.is_contiguous() for tensor in tensors):
            refused = self._reason_against(*tensors, mask, problem)
            if refused:
                raise Refused(refused)

        q, k, v = (tensor.detach().requires_grad_(problem.backward) for tensor in tensors)
        dout = inputs.dout
        if dout is not None and dead is not None:
            dout = torch.where(dead[..., None], torch.zeros_like(dout), dout)

        def call() -> Outputs:
            with self._settings(problem):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, **arguments
                )
                gradients = () if dout is None else torch.autograd.grad(out, (q, k, v), dout)
            outputs = Outputs(out.detach(), None, *gradients)
            if dead is None:
                return outputs
            return settle_empty_rows(outputs, inputs, "unspecified", dead=dead)

        return call

    def _garbage(self, problem: Problem, device: str) -> torch.Tensor | None:
        """Return rows ``(batch, heads, query)`` without keys, where cuDNN leaves finite garbage."""
        # Under the top-left causal mask every row sees key 0.
        if self._backend != "cudnn" or problem.mask == FULL or call_tensors.is_causal(problem):
            return None
        dead = empty_rows(problem, device)
        return dead if bool(dead.any()) else None

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Return the default arithmetic with the deviations of torch's kernels."""
        assumed = super().arithmetic(problem, device)
        if self._backend == "math":
            return replace(assumed, normalised_weights=True)
        if self._backend == "flash":
            assumed = torch_arithmetic.with_split_keys(
                torch_arithmetic.with_short_exp(assumed, device), problem, device
            )
        if self._backend == "efficient":
            assumed = torch_arithmetic.with_three_products(assumed)
        if not problem.backward:
            return assumed
        if self._backend == "flash":
            return torch_arithmetic.with_rounded_sums(assumed, problem, device)
        if self._backend == "cudnn":
            return torch_arithmetic.with_rounded_heads(assumed, problem)
        return torch_arithmetic.with_rounded_weights(assumed)

    @contextlib.contextmanager
    def _settings(self, problem: Problem) -> Iterator[None]:
        grad = torch.set_grad_enabled(problem.backward)
        with grad, torch_arithmetic.fp32_products(problem.dtype), sdpa_kernel(self._kernel):
            yield

    def _unsupported_products(self, problem: Problem, device: str) -> str | None:
        if problem.dtype != "tf32":
            return None
        if device == "cpu":
            return "the CPU has no tf32 products"
        if self._backend == "efficient":
            return "its fp32 products never become tf32 (each is three tf32 products)"
        return None

    def _unsupported_size(self, problem: Problem, device: str) -> str | None:
        """Return a refusal if scores of the unfused formula, or a mask or bias, exceed memory."""
        pairs = problem.query * problem.kv
        every_head = problem.batch * problem.heads * pairs
        if self._backend == "math":
            both = every_head * (16 if problem.backward else 8)  # with both gradients
            return memory_refusal("scores and weights in fp32", both, device)
        if problem.score != NONE:
            return memory_refusal("bias in fp32", every_head * 4, device)
        return (
            None
            if call_tensors.needs_no_mask(problem)
            else memory_refusal("attn_mask", pairs, device)
        )

    def _unsupported_score(self, problem: Problem, device: str) -> str | None:
        if not library.is_additive(problem.score):
            return f"SDPA takes no score mod, and {problem.score} is more than an added number"
        if problem.score == NONE:
            return None
        fmt = self._bias_format(problem, device)
        if not call_tensors.bias_is_exact(problem, fmt, device):
            return f"would round the bias to {fmt.name}"
        return None

    def _bias_format(self, problem: Problem, device: str) -> Format:
        """Return the format of a floating-point attn_mask: fp32 if allowed with any q.

        With a 16-bit q, efficient refuses an fp32 mask, and cudnn silently misreads it (torch
        2.11, cuDNN 9.19).
        """
        allows_fp32 = device == "cpu" or self._backend == "math"
        return FORMATS["fp32"] if allows_fp32 else problem.formats.storage

    def _mask(self, problem: Problem, device: str) -> torch.Tensor | None:
        """Return the attn_mask, ``(batch or 1, heads or 1, query, kv)``, or None."""
        if call_tensors.needs_no_mask(problem):
            return None
        blocks = (
            self._mask_of_rows(problem, device, rows) for rows in call_tensors.row_blocks(problem)
        )
        return torch.cat([*blocks], dim=2)

    def _mask_of_rows(self, problem: Problem, device: str, rows: range) -> torch.Tensor:
        if problem.score == NONE:
            return call_tensors.attention_mask(problem, device, rows)
        fmt = self._bias_format(problem, device)
        return call_tensors.masked_bias(problem, device, rows, fmt)

    def _like_its_mask(self, problem: Problem, device: str) -> torch.Tensor | None:
        """Return an uninitialized tensor with the shape and dtype of ``_mask``, or None."""
        if call_tensors.needs_no_mask(problem):
            return None
        plain = problem.score == NONE
        dtype = torch.bool if plain else self._bias_format(problem, device).torch_dtype
        return torch.empty(call_tensors.mask_size(problem, device), dtype=dtype, device=device)

    def _torch_refusal(self, problem: Problem, device: str) -> str | None:
        """Return why torch does not support these shapes with this backend; None if it does.

        torch's dispatcher gives reasons as Python warnings; ``torch.backends.cuda``'s
        ``can_use_*`` would write them to stderr, past any filter (torch 2.11).
        """
        dtype, sizes = problem.formats.storage.torch_dtype, problem.sizes
        q, k, v = (
            torch.empty(shape, dtype=dtype, device=device, requires_grad=problem.backward)
            for shape in (sizes.q, sizes.k, sizes.v)
        )
        return self._reason_against(q, k, v, self._like_its_mask(problem, device), problem)

    def _reason_against(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        problem: Problem,
    ) -> str | None:
        """Return torch's reason against these very tensors, with strides and alignment; or None."""
        # torch's own dispatcher decides, because its rules change with every release.
        with warnings.catch_warnings(record=True) as caught, self._settings(problem):
            # By default a warning is shown only once.
            warnings.simplefilter("always")
            try:
                backend = torch._fused_sdp_choice(q, k, v, mask, **_arguments(problem))
            except RuntimeError:  # raised if no backend fits
                backend = None
        if backend == self._kernel.value:
            return None
        return _reason(str(w.message) for w in caught)


def _aligned(tensors: Iterable[torch.Tensor]) -> bool:
    return all(tensor.data_ptr() % _VECTOR == 0 for tensor in tensors)


def _arguments(problem: Problem) -> dict[str, Any]:
    return {
        "is_causal": problem.score == NONE and call_tensors.is_causal(problem),
        "scale": problem.scale,
        "enable_gqa": problem.group > 1,
    }


def _reason(messages: Iterable[str]) -> str:
    """Return the first of torch's warnings with a reason against this backend, in one line."""
    for message in messages:
        text = " ".join(message.split("(Triggered internally")[0].split())
        if text and not text.endswith("because:") and "runtime disabled" not in text:
            # Further sentences have sizes and dtypes, which differ in every cell of a report.
            return f"torch: {text.split('. ')[0].rstrip('.')}."
    return "torch has no such kernel for these tensors"


def load_cudnn(device: torch.device) -> None:
    """Load cuDNN by a call of its attention.

    It does not use ``scaled_dot_product_attention``, whose choice of a backend is process-wide.
    """
    q = torch.zeros((1, 1, 128, 64), dtype=torch.bfloat16, device=device)
    torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, q, q, None, compute_log_sumexp=False, dropout_p=0.0, is_causal=False
    )


_SMALLEST_GPU_DIM = 16  # the least dimension of tl.dot
_COMPILED_AT_A_TIME = 64  # compiled functions that are cached
_FP32_BYTES = 4
# Errors of torch 2.11 on an H200 if no tiles fit, even with 65 queries and grouped heads.
_NO_TILES = ("NoValidChoicesError", "out of resource")
# Its error for a score mod that reads one tensor twice.
_READ_TWICE = "multiple indexing operations on the same tensor"


class Flex(Subject):
    """``flex_attention`` with a block mask made outside the call; LSE is the natural logarithm.

    It is compiled on CUDA and eager on the CPU, where compiling would need a C++ compiler. Rows
    that see no key give 0 and −∞. Gradients are autograd's, on CUDA only: torch has none on the
    CPU. Those of tensors that a score mod reads are summed in fp32 by atomic additions.
    """

    name = "flex"
    summary = "torch's flex_attention with the original mods: compiled on CUDA, eager on the CPU"
    compiler: CompilerName = "torch"
    backward = True
    captured = True

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return what torch refuses: head dims below 16 on CUDA, gradients on a CPU, and more."""
        if problem.formats.scaled:
            return "takes no fp8 inputs with descales"
        if device == "cpu":
            if problem.dtype == "tf32":
                return "the CPU has no tf32 products"
            if problem.backward:
                return "torch: FlexAttention does not support backward on CPU"
            pairs = problem.batch * problem.heads * problem.query * problem.kv
            return memory_refusal("scores and weights in fp32", pairs * 8, device)
        if min(problem.head_dim, problem.value_dim) < _SMALLEST_GPU_DIM:
            return (
                f"head_dim={problem.head_dim} value_dim={problem.value_dim}: "
                f"compiled flex_attention needs at least {_SMALLEST_GPU_DIM}"
            )
        return None

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Return arithmetic with the full tanh; on a CPU, P is divided before it is rounded."""
        assumed = with_full_tanh(super().arithmetic(problem, device), problem)
        return replace(assumed, normalised_weights=device == "cpu")

    def prepare(self, inputs: Inputs) -> Call:
        """Make the block mask, and compile on CUDA, which takes seconds."""
        problem, device = inputs.problem, inputs.q.device
        score = None if problem.score == NONE else flex_score_mod(problem, str(device))
        read = captured_tensors(score, device) if score and problem.dcaptured else ()
        if any(tensor.itemsize < _FP32_BYTES for tensor in read):
            raise Refused("torch rounds the gradient of a 16-bit tensor to 16 bits")
        blocks = None if problem.mask == FULL else flex_block_mask(problem, str(device))
        # Problems that differ in seed or distribution share a compiled function.
        structure = problem.replace(seed=0, distribution="normal")
        if device.type != "cpu":
            with no_garbage_collection():
                import_module("torch._inductor.compile_fx")
        function = _eager if device.type == "cpu" else _compiled(structure)
        tensors = (inputs.q, inputs.k, inputs.v)
        leaves = tuple(tensor.detach().requires_grad_(problem.backward) for tensor in tensors)

        def call() -> Outputs:
            with (
                torch.set_grad_enabled(problem.backward),
                _requiring_grad(read),
                torch_arithmetic.fp32_products(problem.dtype),
            ):
                out, lse = function(*leaves, score, blocks, problem.scale)
                gradients = _gradients(out, lse, (*leaves, *read), inputs)
            outputs = Outputs(out.detach(), None if lse is None else lse.detach(), *gradients[:3])
            if not read:
                return outputs
            dcaptured = torch.cat([gradient.float().flatten() for gradient in gradients[3:]])
            return replace(outputs, dcaptured=dcaptured)

        if device.type != "cpu":
            _compile_now(call)
        return call


def _gradients(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    leaves: tuple[torch.Tensor, ...],
    inputs: Inputs,
) -> tuple[torch.Tensor, ...]:
    """Return gradients of ``leaves`` (q, k and v first); empty if none are requested."""
    if inputs.dout is None:
        return ()
    results, gradients = [out], [inputs.dout]
    if inputs.dlse is not None:
        assert lse is not None, "it is asked for"
        results, gradients = [out, lse], [inputs.dout, inputs.dlse]
    return torch.autograd.grad(results, leaves, gradients)


@contextlib.contextmanager
def _requiring_grad(read: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let tensors that a mod captures require gradients within this context."""
    # The mod closes over these very tensors, so copies that require gradients would not be read.
    changed = [tensor for tensor in read if not tensor.requires_grad]
    try:
        for tensor in changed:
            tensor.requires_grad_()
        yield
    finally:
        for tensor in changed:
            tensor.requires_grad_(False)  # noqa: FBT003  (torch's own has no name in its stubs)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score: ScoreMod | None,
    blocks: BlockMask | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, aux = flex.flex_attention(
        q,
        k,
        v,
        score_mod=score,
        block_mask=blocks,
        scale=scale,
        enable_gqa=True,
        return_aux=flex.AuxRequest(lse=True),
    )
    return out, aux.lse


def _eager(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call flex_attention's own dense formula."""
    with uncompiled_flex():
        return _attention(*arguments)


@functools.lru_cache(maxsize=_COMPILED_AT_A_TIME)
def _compiled(structure: Problem) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return a compiled function for Problems that equal ``structure`` but for their numbers.

    Each has its own code object: torch counts recompilations of a code object, and a ninth
    structure would exceed its limit. With ``fullgraph``, what cannot be compiled is an error;
    otherwise torch would silently run the eager formula.
    """
    code = _attention.__code__.replace(co_name=f"flex_attention_{structure.id}")
    function = types.FunctionType(code, _attention.__globals__)
    compiled: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = torch.compile(
        function, fullgraph=True, dynamic=False
    )
    return compiled


def _compile_now(call: Call) -> None:
    """Call once without warnings, so that timed calls do not compile.

    Raises Refused if torch's compiler finds no tiles that fit the GPU, or cannot sum gradients of a
    tensor that a score mod reads twice.
    """
    # Imported here because torch's compiler takes longer to import than torch itself.
    from torch._inductor.exc import InductorError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except InductorError as error:
            if _READ_TWICE in str(error):
                raise Refused("torch adds no gradients up of a tensor read twice") from error
            if any(message in str(error) for message in _NO_TILES):
                raise Refused(
                    f"torch's compiler finds no tiles for it: {error_line(error)}"
                ) from error
            raise

"""Create and run a transformer whose attention is replaced by any function.

transformers looks up every layer's attention by name in a registry. attncheck registers its own
name, with a function that converts a call into Inputs, and Outputs into the layer's result; for a
loss it converts the gradient into a call with a backward. So the model can run with a kernel, the
ideal kernel or the oracle. Needs transformers, the extra ``model``; nothing is ever downloaded.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.core.errors import UsageError, require_known
from attncheck.core.formats import DTYPES, fp32
from attncheck.core.mod_spec import FULL, NONE, Dimensions, Spec
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.inputs.recorded_calls import named_mask
from attncheck.subjects.capabilities.subject import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from attncheck.core.outputs import Outputs

_NAME = "attncheck"  # The name of the attention in transformers' registry.
_INSTALL = "attncheck model needs transformers: pip install 'attncheck[model]'."
_VOCABULARY = 128
_LEAST_HEAD_DIM, _USUAL_HEAD_DIM = 16, 64
_WINDOWS_PER_PROMPT = 3  # Length of a prompt, in sliding windows.
_SOFTCAP = 5.0  # Logits of random weights are about 1, which a usual cap of 50 would hardly change.

SHAPES: dict[str, tuple[str, str]] = {
    "llama": ("llama", "causal, key heads shared by two query heads"),
    "gemma": ("gemma2", "softcap, every other layer a sliding window"),
    "gpt-oss": ("gpt_oss", "sinks, every other layer a sliding window, experts"),
    "mistral": ("mistral", "a sliding window, key heads shared by two query heads"),
    "bert": ("bert", "bidirectional"),
}
"""Built-in model → transformers' name of the architecture, and a summary of its attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a model and its prompt; ``layers`` and ``hidden`` are for built-in models."""

    layers: int = 4
    hidden: int = 64  # width, split into heads of 16, or of 64 for widths from 256 on
    length: int = 48  # tokens of the prompt
    batch: int = 2  # number of prompts, of random tokens
    steps: int = 8  # tokens that are decoded after the prompt; 0 for none
    dtype: str = "bf16"  # of weights and activations: fp32, fp16 or bf16
    device: str = "cpu"
    seed: int = 0  # seed of random weights and tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlace:
    """The position of an attention call in a model's run."""

    layer: int  # counted from 0, in the order of first calls
    module: str  # the layer's name in the model
    step: int  # 0: the prompt; n: the n-th decoded token
    backward: bool = False  # whether gradients are asked for too


Attend = "Callable[[CallPlace, Inputs], Outputs]"


@dataclass(kw_only=True)
class ModelRun:
    """The results of a model's run."""

    # ``prefill`` (the prompt) and ``decode`` (all steps concatenated) → the state after each layer,
    # ``(batch, positions, width)``, and last the logits, ``(batch, positions, words)``.
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the loss, by parameter
    tokens: Tensor | None = None  # likeliest words after prompt and each step, (batch, 1 + steps)


def make_model(spec: str, size: ModelSize) -> nn.Module:
    """Return a model in eval mode, whose attention ``run_model`` replaces.

    Args:
        spec: A name in ``SHAPES``, with random weights; or a folder with config.json, and weights
            in safetensors, else random.

    Raises:
        UsageError: if transformers is missing or there is no such model; in one line.
    """
    transformers = _transformers()
    dtype = DTYPES[size.dtype].storage.torch_dtype
    if spec in SHAPES:
        config = transformers.AutoConfig.for_model(SHAPES[spec][0], **_shape(spec, size))
    elif Path(spec, "config.json").is_file():
        config = _load(spec, transformers.AutoConfig.from_pretrained, spec, local_files_only=True)
    else:
        require_known("model", [spec], SHAPES) if "/" not in spec else None
        raise UsageError(f"model {spec!r} is no folder with a config.json.")
    masked = any(name.endswith("ForMaskedLM") for name in config.architectures or ())
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": _NAME}
    torch.manual_seed(size.seed)
    if spec not in SHAPES and _has_weights(spec):
        model = _load(spec, auto.from_pretrained, spec, local_files_only=True, **options)
    else:
        model = _load(spec, auto.from_config, config, **options)
    # torch's grouped products of experts have no float64.
    model.config._experts_implementation = "eager"
    model.eval().to(size.device)
    return model  # type: ignore[no-any-return]  # untyped in transformers


def _has_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))


def _load(spec: str, make: Callable[..., Any], *what: Any, **how: Any) -> Any:
    try:
        return make(*what, **how)
    except Exception as error:  # noqa: BLE001  # config classes raise errors of any type
        line = " ".join(str(error).split())
        raise UsageError(f"model {spec!r} cannot be loaded: {line}") from None


def _shape(spec: str, size: ModelSize) -> dict[str, Any]:
    """Return the keyword arguments of a built-in model's config."""
    narrow = size.hidden < 4 * _USUAL_HEAD_DIM
    head_dim = _LEAST_HEAD_DIM if narrow else _USUAL_HEAD_DIM
    heads = size.hidden // head_dim
    if heads < 2 or size.hidden % (2 * head_dim):
        raise UsageError(f"--hidden {size.hidden} must be a multiple of {2 * head_dim}.")
    shape: dict[str, Any] = {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
        "intermediate_size": 2 * size.hidden,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": size.length + size.steps,
        # Makes q·k about 1, as in a trained model: with transformers' default of 0.02 every row
        # would give all keys nearly the same weight, and few faults would be visible.
        "initializer_range": size.hidden**-0.5,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if spec == "bert":
        return shape | {"architectures": ["BertForMaskedLM"]}
    shape |= {"num_key_value_heads": heads // 2, "head_dim": head_dim}
    if spec != "llama":
        shape["sliding_window"] = max(2, size.length // _WINDOWS_PER_PROMPT)
    if spec == "gemma":
        shape |= {"query_pre_attn_scalar": head_dim, "attn_logit_softcapping": _SOFTCAP}
    if spec == "gpt-oss":
        # All experts are used: with a selection, rounding alone would select other experts.
        shape |= {"num_local_experts": 2, "num_experts_per_tok": 2}
    return shape


def describe_model(spec: str, size: ModelSize) -> str:
    """Return a description of a model in one line."""
    if spec not in SHAPES:
        return f"from a folder, {'its' if _has_weights(spec) else 'random'} weights"
    return f"{SHAPES[spec][1]}; {size.layers} layers, width {size.hidden}, random weights"


def transformers_version() -> str:
    """Return transformers' version; raises UsageError if it is not installed."""
    version: str = _transformers().__version__
    return version


def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it on import; prevents downloads
    try:
        import transformers
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise UsageError(_INSTALL) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    # Masks are bool tables, or None if a causal flag or no mask is equivalent.
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return transformers


def exact_model(model: nn.Module) -> nn.Module:
    """Return a copy of the model in float64, for ``run_model`` with ``exact``."""
    return copy.deepcopy(model).double()


class _KeepFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Replaces casts to float32 by casts to float64: norms, positions and softmaxes have them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.on and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


class _Swap:
    """The replaced attention of one run, which counts the calls of each layer."""

    def __init__(self, model: nn.Module, attend: Any, double: _KeepFloat64 | None) -> None:
        self._attend, self._double = attend, double
        self._names = {module: name for name, module in model.named_modules()}
        self.layers: dict[nn.Module, int] = {}
        self._calls: Counter[nn.Module] = Counter()

    def place(self, module: nn.Module) -> CallPlace:
        """Count a call of ``module`` and return its place."""
        layer = self.layers.setdefault(module, len(self.layers))
        self._calls[module] += 1
        name = self._names.get(module, type(module).__name__)
        return CallPlace(layer=layer, module=name, step=self._calls[module] - 1)

    def outputs(
        self, place: CallPlace, problem: Problem, tensors: tuple[Tensor, ...], dout: Tensor | None
    ) -> Outputs:
        """Return the attention's outputs for q, k, v and the sinks, if any."""
        q, k, v, *sinks = (tensor.detach() for tensor in tensors)
        if self._double is not None:
            self._double.on = False  # sinks are fp32 in every dtype
        try:
            sink = sinks[0].float() if sinks else None
            dout = None if dout is None else dout.contiguous()
            return self._attend(place, Inputs(problem=problem, q=q, k=k, v=v, sink=sink, dout=dout))  # type: ignore[no-any-return]  # an Attend
        finally:
            if self._double is not None:
                self._double.on = True


_RUNNING: list[_Swap] = []  # Innermost last; global like transformers' registry.


class _Attention(torch.autograd.Function):
    """Attention for autograd; its backward repeats the call with gradients."""

    @staticmethod
    def forward(ctx: Any, swap: _Swap, place: CallPlace, problem: Problem, *tensors: Any) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.called = swap, place, problem
        # A copy, because autograd changes the returned tensor, and the output is judged later.
        return swap.outputs(place, problem, tensors, None).out.clone()

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        swap, place, problem = ctx.called
        place = CallPlace(layer=place.layer, module=place.module, step=place.step, backward=True)
        tensors = ctx.saved_tensors
        outputs = swap.outputs(place, problem.replace(backward=True), tensors, dout)
        of_each = (outputs.dq, outputs.dk, outputs.dv, outputs.dsink)[: len(tensors)]
        gradients = (one.to(tensor.dtype) for one, tensor in zip(of_each, tensors, strict=True))
        return None, None, None, *gradients


def _attention(  # noqa: PLR0913, PLR0917  # the registry's signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001  # the registry's signature
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' registry.

    Returns out as ``(batch, query, heads, value_dim)``, and no weights.
    """
    if dropout or options.get("position_bias") is not None:
        raise Refused("its attention has dropout or a bias of its own, which is not passed on")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query_length, kv = query.shape[2], key.shape[2]
    dimensions = Dimensions(batch=query.shape[0], heads=query.shape[1], query=query_length, kv=kv)
    mask: Spec | None = Spec.of("causal") if causal and query_length > 1 else FULL
    if attention_mask is not None:
        is_bool_mask = attention_mask.dtype is torch.bool
        mask = named_mask(attention_mask[..., :kv], dimensions) if is_bool_mask else None
    if mask is None:
        raise Refused("its mask is none that kernels know by name: causal, a window, or none")
    dtypes = {one.storage.torch_dtype: name for name, one in DTYPES.items() if name != "tf32"}
    problem = Problem(
        batch=query.shape[0],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        query=query_length,
        kv=kv,
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        dtype=dtypes[query.dtype],
        mask=mask,
        score=NONE if softcap is None else Spec.of("softcap", cap=float(softcap)),
        scale=fp32(query.shape[3] ** -0.5 if scaling is None else scaling),
        sink=s_aux is not None,
    )
    swap = _RUNNING[-1]
    tensors = (query, key, value, *([] if s_aux is None else [s_aux]))
    out: Tensor = _Attention.apply(swap, swap.place(module), problem, *tensors)  # type: ignore[no-untyped-call]  # torch's
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def _swapped(model: nn.Module, attend: Any, double: _KeepFloat64 | None) -> Iterator[_Swap]:
    swap = _Swap(model, attend, double)
    _RUNNING.append(swap)
    try:
        with nullcontext() if double is None else double:
            yield swap
    finally:
        _RUNNING.pop()


def draw_tokens(model: nn.Module, size: ModelSize) -> Tensor:
    """Return random tokens of a prompt, ``(batch, length)``."""
    generator = torch.Generator().manual_seed(size.seed)
    words: int = model.config.vocab_size  # type: ignore[assignment,union-attr]  # the config has it
    tokens = torch.randint(words, (size.batch, size.length), generator=generator)
    return tokens.to(size.device)


def run_model(
    model: nn.Module,
    prompt: Tensor,
    attend: Any,
    *,
    steps: int,
    forced: Tensor | None = None,
    backward: bool = True,
    exact: bool = False,
) -> ModelRun:
    """Run a prompt through ``model``, a training step's gradients, and decoding with a cache.

    Args:
        prompt: Tokens ``(batch, length)``.
        attend: An ``Attend`` that computes each layer's attention.
        steps: Number of tokens to decode; a model that is not causal decodes none.
        forced: Tokens ``(batch, steps)`` to decode in place of the likeliest, so that two runs can
            be compared step by step; None for the likeliest.
        backward: Whether to compute gradients, of the loss of predicting the next words (the words
            themselves if the model is not causal).
        exact: Whether all casts to float32 are replaced by casts to float64.

    Raises:
        Refused: if an attention call is not supported, or the model does not use the registry.
    """
    run = ModelRun()
    causal = "ForMaskedLM" not in type(model).__name__ and steps > 0
    with _swapped(model, attend, _KeepFloat64() if exact else None) as swap:
        cache = _new_cache(model) if causal else {}
        with torch.set_grad_enabled(backward):
            model.zero_grad()
            out = model(input_ids=prompt, output_hidden_states=True, use_cache=causal, **cache)
            if not swap.layers:
                raise Refused("none of its attention goes through transformers' registry")
            if backward:
                _loss(out.logits, prompt, causal=causal).backward()  # type: ignore[no-untyped-call]
        run.states["prefill"] = _states(out)
        run.gradients = {
            name: parameter.grad.double()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        model.zero_grad()
        if not causal:
            return run
        likeliest, states = [out.logits[:, -1].argmax(-1)], []
        with torch.no_grad():
            for step in range(steps):
                word = likeliest[-1] if forced is None else forced[:, step]
                out = model(
                    input_ids=word[:, None], output_hidden_states=True, use_cache=True, **cache
                )
                states.append(_states(out))
                likeliest.append(out.logits[:, -1].argmax(-1))
    run.states["decode"] = [torch.cat(each, dim=1) for each in zip(*states, strict=True)]
    run.tokens = torch.stack(likeliest, dim=1)
    return run


def _new_cache(model: nn.Module) -> dict[str, Any]:
    """Return a cache as the model's keyword argument, whose name depends on the version."""
    from transformers import DynamicCache

    names = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    return {name: DynamicCache(config=model.config)}


def _loss(logits: Tensor, tokens: Tensor, *, causal: bool) -> Tensor:
    if causal:
        logits, tokens = logits[:, :-1], tokens[:, 1:]
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(precise.flatten(0, 1), tokens.flatten())


def _states(out: Any) -> list[Tensor]:
    return [
        *(each.detach().double() for each in out.hidden_states[1:]),
        out.logits.detach().double(),
    ]


def layer_of(parameter: str) -> int | None:
    """Return the layer of a parameter by its name; None if it belongs to no layer."""
    number = re.search(r"\.(\d+)\.", parameter)
    return None if number is None else int(number[1])

"""A recorded call as a Problem: the file's schema and the call's distribution, mask and score mod.

The metadata has one entry, ``attncheck``: the JSON of a ``Header``. The tensors of call i, counted
from 0, all contiguous:

| tensor | shape | dtype |
|---|---|---|
| ``i.q`` | (batch, heads, query, head_dim) | the call's |
| ``i.k`` | (batch, kv_heads, kv, head_dim) | the call's |
| ``i.v`` | (batch, kv_heads, kv, value_dim) | the call's |
| ``i.mask`` | (batch, heads, query, kv), each axis possibly 1: the same for all | bool, or fp32, fp16 or bf16 that is added to the scores |
| ``i.sink`` | (heads,) | fp32 |
| ``i.dout`` | (batch, heads, query, value_dim) | the call's |

``i.mask`` exists for the mask kinds ``bool`` and ``additive`` only, ``i.sink`` for calls with
sinks, ``i.dout`` for calls with a backward.
"""  # noqa: E501  # a table's row is a line

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import torch

from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import FULL, NONE, Dimensions, Entry, Spec
from attncheck.inputs.distributions import DISTRIBUTIONS, Distribution, Drawn, Floats, Sizes
from attncheck.inputs.problem import USUAL_SCALE, Problem
from attncheck.mods.library import build_mask
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES, table_reader

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.core.draws import Draws
    from attncheck.mods.signatures import MaskMod, ScoreMod

VERSION = 1
METADATA = "attncheck"
DTYPES = ("fp32", "fp16", "bf16")

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Dtype = Literal["fp32", "fp16", "bf16"]
MaskKind = Literal["none", "causal", "causal_bottom_right", "bool", "additive"]


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of attention."""

    # ``call-7``, or the module that made it and the number of its call: ``blocks.0.attention/0``.
    # Printable, and not blank.
    name: str
    batch: Size  # sequences; axes before the heads are folded into this one
    heads: Size
    kv_heads: Size
    query: Size
    kv: Size
    head_dim: Size  # columns of q and k
    value_dim: Size  # columns of v
    dtype: Dtype  # of q, k and v: fp32, fp16 or bf16
    # ``none``; ``causal`` (is_causal: row i sees keys up to i); ``causal_bottom_right`` (torch's
    # ``causal_lower_right``); ``bool`` (True: seen) or ``additive``.
    mask: MaskKind
    scale: float | None = None  # the argument; None for the default, 1/√head_dim
    dropout: float = 0.0  # dropout_p; a kernel is judged without dropout, as its mask is not known
    softcap: float | None = None  # scores are limited to ±softcap, before a mask; None if not
    sink: bool = False  # whether each head has a logit in addition to its keys
    backward: bool = False  # whether there is a loss's gradient with respect to the result

    @property
    def sizes(self) -> Sizes:
        """The sizes of its tensors."""
        return Sizes(**{field.name: getattr(self, field.name) for field in fields(Sizes)})


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's metadata."""

    version: int  # of this schema
    calls: list[Call]


def tensor_name(call: int, tensor: str) -> str:
    """Return the name in the file of a call's tensor ``q``, ``k``, ``v`` or ``mask``."""
    return f"{call}.{tensor}"


def sizes_problem(call: Call) -> Problem:
    """Return a Problem of the call's sizes, dtype and scale; raise ProblemError if none exists."""
    return Problem(
        **asdict(call.sizes),
        dtype=call.dtype,
        scale=USUAL_SCALE if call.scale is None else call.scale,
        score=NONE if call.softcap is None else Spec.of("softcap", cap=call.softcap),
        sink=call.sink,
        backward=call.backward,
    )


def named_mask(seen: Tensor, dimensions: Dimensions) -> Spec | None:
    """Return the mask of the library that equals a table; None if none of those tried does.

    Kernels know masks by name: a causal mask that is given as a table would be an arbitrary one.

    Args:
        seen: bool ``(batch or 1, heads or 1, query or 1, kv or 1)``, True where a row sees a key.
    """
    if bool(seen.all()):
        return FULL
    table, query, kv = seen[0, 0], dimensions.query, dimensions.kv
    if table.shape != (query, kv) or not bool((seen == table).all()):
        return None
    names = ["causal"] if query >= kv else ["causal", "causal_bottom_right"]
    window = Spec.of("sliding_window", window=int(table.sum(-1).max()))
    if kv > query:  # the rows are the last ones of a square mask
        window = Spec.of("offset", window, rows=kv - query)
    rows = torch.arange(query, device=seen.device)[:, None]
    keys = torch.arange(kv, device=seen.device)
    first = rows.new_zeros(())
    for mask in (*map(Spec.of, names), window):
        mask_table = build_mask(mask, dimensions, str(seen.device))(first, first, rows, keys)
        if torch.equal(mask_table, table):
            return mask
    return None


@dataclass(frozen=True, eq=False, kw_only=True)
class Recording:
    """One recorded call."""

    file: str  # name of the file it was read from, without its folder
    call: Call  # its description
    q: Tensor  # ``(batch, heads, query, head_dim)``
    k: Tensor  # ``(batch, kv_heads, kv, head_dim)``
    v: Tensor  # ``(batch, kv_heads, kv, value_dim)``
    # ``(batch or 1, heads or 1, query or 1, kv or 1)``: bool (True: seen), or addends of the
    # scores; None if the call's kind of mask needs no tensor.
    mask: Tensor | None = None
    sink: Tensor | None = None  # fp32 ``(heads,)``; None without sinks
    dout: Tensor | None = None  # ``(batch, heads, query, value_dim)``; None without a backward

    @cached_property
    def name(self) -> str:
        """File, call and eight hexadecimal digits of the SHA-256 of all its tensors.

        The recording's distribution and its mask or score mod have this name, so that a Problem
        with it has the same id on every machine, and other numbers give another id.
        """
        # The hash is of bits, since −0 and 0 are different inputs.
        digest = hashlib.sha256()
        for name, tensor in self.tensors().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return f"{self.file}:{self.call.name}@{digest.hexdigest()[:8]}"

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that are not None, by name."""
        names = ("q", "k", "v", "mask", "sink", "dout")
        named = ((name, getattr(self, name)) for name in names)
        return {name: tensor for name, tensor in named if tensor is not None}

    def problem(self, dtype: str | None = None) -> Problem:
        """Return the call as a Problem.

        Its distribution draws the recorded numbers (after ``register``), which
        ``input_tensors.draw_inputs`` rounds to ``dtype``: in the recorded dtype they are the
        recorded bits.

        An additive mask becomes a score mod that adds it, where −∞ hides a key, or a bool mask if
        it holds only 0 and −∞. A bool mask that ``named_mask`` finds has its name in the library.

        Args:
            dtype: A name of ``formats.DTYPES`` (default: the recorded one).
        """
        # Mods are found by the recording's name, since JSON holds no tensors.
        mask, added = self._mods()
        problem = sizes_problem(self.call)
        score = added if problem.score == NONE else problem.score
        if NONE not in (added, problem.score):
            score = Spec.of("chain", problem.score, added)
        return problem.replace(
            dtype=dtype or self.call.dtype, mask=mask, score=score, distribution=self.name
        )

    def register(self) -> None:
        """Register the distribution, mask and score mod of its Problem in this process."""
        DISTRIBUTIONS[self.name] = Distribution(
            name=self.name,
            summary=f"recorded: {self.call.name} of {self.file}",
            draw=self._draw,
            sink=None if self.sink is None else self.sink.clone,
            dout=None if (dout := self.dout) is None else lambda *_: _numbers(dout),
        )
        mask, score = self._mods()
        summary = f"recorded with {self.call.name} of {self.file}"
        if mask.name == self.name:
            MASKS[self.name] = Entry(summary=summary, build=self._mask_mod)
        if score.name == self.name:
            SCORES[self.name] = Entry(summary=summary, build=self._score_mod)

    @cached_property
    def _visible(self) -> Tensor | None:
        """The mask as a bool tensor; None without a mask or with addends besides 0 and −∞."""
        if self.mask is None or self.mask.dtype is torch.bool:
            return self.mask
        # Only 0 and −∞ make a bool mask, for which kernels have a faster path.
        visible = self.mask == 0
        return visible if bool((visible | torch.isneginf(self.mask)).all()) else None

    def _mods(self) -> tuple[Spec, Spec]:
        if self.mask is None:
            return (FULL if self.call.mask == "none" else Spec.of(self.call.mask)), NONE
        if self._visible is None:
            return FULL, Spec.of(self.name)
        dimensions = sizes_problem(self.call).dimensions
        return named_mask(self._visible, dimensions) or Spec.of(self.name), NONE

    def _draw(self, draws: Draws, sizes: Sizes) -> Drawn:
        recorded = tuple(tuple(tensor.shape) for tensor in (self.q, self.k, self.v))
        if (sizes.q, sizes.k, sizes.v) != recorded:
            raise ProblemError(
                f"distribution {self.name!r} is recorded for q, k, v of shapes {recorded}: "
                f"it has none of {(sizes.q, sizes.k, sizes.v)}."
            )
        if draws.seed != 0:
            raise ProblemError(
                f"distribution {self.name!r} is recorded, there is one draw of it: "
                f"seed={draws.seed} must be 0."
            )
        return _numbers(self.q), _numbers(self.k), _numbers(self.v)

    def _mask_mod(self, _: object, dimensions: Dimensions, device: str) -> MaskMod:
        assert self._visible is not None
        table = self._check_table(self._visible, dimensions).to(device)
        read = table_reader(table)

        def recorded_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return read(b, h, q_idx, kv_idx)

        return recorded_mask

    def _score_mod(self, _: object, dimensions: Dimensions, device: str) -> ScoreMod:
        assert self.mask is not None
        # fp32 holds fp16 and bf16, and is the dtype that a traced mod may capture.
        read = table_reader(self._check_table(self.mask, dimensions).to(device, torch.float32))

        def recorded_bias(
            score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
        ) -> Tensor:
            return score + read(b, h, q_idx, kv_idx).to(score.dtype)

        return recorded_bias

    def _check_table(self, table: Tensor, dims: Dimensions) -> Tensor:
        sizes = (dims.batch, dims.heads, dims.query, dims.kv)
        if any(have not in {1, size} for have, size in zip(table.shape, sizes, strict=True)):
            raise ProblemError(
                f"the mask of {self.name!r} is recorded with shape {tuple(table.shape)}: it does "
                f"not fit scores of shape {sizes}."
            )
        return table


def _numbers(tensor: Tensor) -> Floats:
    # A copy, since drawn numbers may be written to.
    numbers: Floats = tensor.to(torch.float64, copy=True).numpy()
    return numbers

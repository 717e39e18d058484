"""The report of ``attncheck model``: kernels in a whole transformer, beside right ones."""

from __future__ import annotations

from typing import Literal

import msgspec

from attncheck.records.record import Environment, Status

Phase = Literal["prefill", "decode", "training"]


class Drift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Distance of one thing from the same in the fp64 model with exact attention."""

    phase: Phase  # the prompt; tokens decoded with a cache; gradients of one training step
    # ``layer 0``: the state after it, or of a training step its gradients; ``logits``; ``KL``: of
    # the distributions of the next word, in nats a position; ``gradients``: of all parameters.
    where: str
    error: float  # ‖difference‖ ÷ ‖exact‖; of ``KL`` the mean itself
    floor: (
        float  # the median of the same model's with right kernels: ideal ones, of several tilings
    )
    most: float  # the largest of theirs
    as_far: int  # how many of them are at least as far


class ModelCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls of one layer's attention, each judged on the very tensors that it received."""

    layer: int  # counted from 0
    module: str  # its name in the model
    calls: int  # how many were judged, backwards included
    failed: int  # how many of them failed
    over_bound: float | None  # the largest error ÷ deterministic bound; None where none has one


class ModelFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first call that failed, in the order of the run."""

    # layer, module: as of its ModelCall.
    layer: int
    module: str
    step: int  # 0: the prompt; n: the n-th decoded token
    backward: bool  # whether it was asked for gradients
    # head, position: of the element furthest beyond what is allowed, of the sequence ``batch``;
    # None where the call gave nothing. A gradient's head may be a key head.
    batch: int | None = None
    head: int | None = None
    position: int | None = None  # in the sequence, counted from 0
    reason: str  # why it failed, in a line
    id: str  # of the failure: ``attncheck repro`` takes it
    recording: str  # name of the file, beside the failure, that holds the call's tensors
    again: bool | None = None  # whether it gave the same bits when asked alone; None: not asked


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel in one model."""

    model: str
    kernel: str
    beside: bool = False  # whether nobody asked for it: to compare with, and not judged
    # ``fail`` where a call failed; ``warn`` where none did, and yet no right kernel drifts as far.
    status: Status
    reason: str = ""  # why, in one line; empty for a pass
    drifts: tuple[Drift, ...] = ()
    # Chance that a right kernel drifts so far: (right ones that do + 1) ÷ (right ones + 1), of the
    # logits of prefill and decode and of the gradients, each ÷ its median, the largest of them.
    chance: float | None = None
    # The first decoded word, counted from 0, that is another than the exact model's; None for none.
    diverges: int | None = None
    right_diverge: int | None = None  # the earliest of the right kernels' likewise
    # gradient_norm, exact_norm: of all parameters, in the training step; None where there is none.
    gradient_norm: float | None = None
    exact_norm: float | None = None
    calls: tuple[ModelCall, ...] = ()  # one a layer; none where none was judged
    fault: ModelFault | None = None


class ModelReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records with what they share."""

    schema: int = 1
    command: str
    environment: Environment
    transformers: str  # its version
    # dtype, batch, length, steps: of weights and activations, prompts, their tokens, and the
    # tokens decoded after them.
    dtype: str
    batch: int
    length: int
    steps: int
    models: dict[str, str]  # name → what it is, in a line
    right: int  # right kernels that each kernel is compared with
    records: tuple[ModelRecord, ...]  # one a model and kernel

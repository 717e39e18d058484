"""The report of ``attncheck model``: kernels in a whole transformer, compared with correct ones."""

from __future__ import annotations

from typing import Literal

import msgspec

from attncheck.records.record import Environment, Status

Phase = Literal["prefill", "decode", "training"]


class Drift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Distance of one quantity from its value in the fp64 model with exact attention."""

    phase: Phase  # the prompt; tokens decoded with a cache; gradients of one training step
    # ``layer 0``: the state after it, or its gradients in a training step; ``logits``; ``KL``: of
    # the next word's distributions, in nats a position; ``gradients``: of all parameters.
    where: str
    error: float  # ‖difference‖ ÷ ‖exact‖; for ``KL`` the mean itself
    floor: float  # median error with correct kernels: ideal ones of several tilings
    most: float  # largest error with correct kernels
    as_far: int  # number of correct kernels that are at least as far off


class ModelCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls of one layer's attention, each judged on the tensors that it received."""

    layer: int  # counted from 0
    module: str  # its name in the model
    calls: int  # number of judged calls, backwards included
    failed: int  # number of these that failed
    over_bound: float | None  # largest error ÷ deterministic bound; None where no call has a bound


class ModelFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first call that failed, in the order of the run."""

    # layer, module: as in ModelCall.
    layer: int
    module: str
    step: int  # 0: the prompt; n: the n-th decoded token
    backward: bool  # whether it was asked for gradients
    # batch, head, position: place of the element with the largest error ÷ allowance; None where the
    # call gave nothing. A gradient's head may be a key head.
    batch: int | None = None
    head: int | None = None
    position: int | None = None  # in the sequence, counted from 0
    reason: str  # why it failed, in a line
    id: str  # id of the failure for ``attncheck repro``
    recording: str  # name of the file with the call's tensors, in the failure's folder
    again: bool | None = None  # whether it gave the same bits when called alone; None: not called


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel in one model."""

    model: str
    kernel: str
    # Whether it only serves as a comparison and is not judged.
    for_comparison: bool = msgspec.field(default=False, name="beside")
    # ``fail`` where a call failed; ``warn`` where none did, but no correct kernel drifts as far.
    status: Status
    reason: str = ""  # why, in one line; empty for a pass
    drifts: tuple[Drift, ...] = ()
    # Probability that a correct kernel drifts so far, (correct ones that do + 1) ÷ (correct ones +
    # 1), for the largest drift ÷ median of the prefill's and decode's logits and the gradients.
    chance: float | None = None
    # Index, from 0, of the first decoded word that differs from the exact model's; None for none.
    diverges: int | None = None
    right_diverge: int | None = None  # the smallest such index of the correct kernels
    # gradient_norm, exact_norm: norm of the gradients of all parameters in the training step, with
    # the kernel and in the exact model; None without such a step.
    gradient_norm: float | None = None
    exact_norm: float | None = None
    calls: tuple[ModelCall, ...] = ()  # one for each layer; empty where none was judged
    fault: ModelFault | None = None


class ModelReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records of kernels in models, with the data that they share."""

    schema: int = 1
    command: str
    environment: Environment
    transformers: str  # its version
    dtype: str  # dtype of weights and activations
    batch: int  # number of prompts
    length: int  # tokens of a prompt
    steps: int  # tokens decoded after the prompt
    models: dict[str, str]  # name → one-line description
    right: int  # number of correct kernels that each kernel is compared with
    records: tuple[ModelRecord, ...]  # one for each model and kernel

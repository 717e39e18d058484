"""A piece of work that is done whole or again, and what comes of it: what a journal holds."""

from __future__ import annotations

import base64
import hashlib
from typing import Any, Literal

import msgspec

from attncheck.gate_record import Answer, Stage  # noqa: TC001  # msgspec reads the annotations

__all__ = ["Done", "Unit"]


class Unit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One piece of work. It says everything that doing it takes: any process can, on any machine.

    Attributes:
        kind: ``describe``: which kernel is this, and what is it to be asked. ``draw``: Cases of a
            property. ``ask``: one Case. ``shrink``: the smallest Case that fails like this one.
            ``fault``: whether a whole gate sees a planted fault.
        stage: Which part of the gate it belongs to.
        kernel: As asked for: a name, ``file.py::name`` or ``package.module:name``; of a fault
            ``name@host``.
        convention: A name of a calling convention; empty for the first that fits.
        commit: Of which commit the kernel is: forty hexadecimal digits. Empty for the files as they
            are. Where its files lie is no part of a unit: that differs from run to run.
        device: ``cpu`` or ``cuda``.
        tier: How hard the kernel is asked.
        dtype, family: Of a draw; empty elsewhere.
        variant: What reports call the Case.
        test: ``test_causal.py::test_attention_is_exact``; empty where none asks.
        case: As JSON; empty of a unit that has none.
        alone: Whether it is to be done in processes that have done nothing else.
    """

    kind: Literal["describe", "draw", "ask", "shrink", "fault"]
    stage: Stage
    kernel: str
    convention: str = ""
    commit: str = ""
    device: str
    tier: str = ""
    dtype: str = ""
    family: str = ""
    variant: str = ""
    test: str = ""
    case: dict[str, Any] = {}
    alone: bool = False

    @property
    def id(self) -> str:
        """Sixteen letters and digits that stand for it on every machine; ``alone`` is no part."""
        data = msgspec.to_builtins(msgspec.structs.replace(self, alone=False))
        digest = hashlib.sha256(msgspec.json.encode(data, order="sorted")).digest()
        return base64.b32encode(digest)[:16].decode().lower()


class Done(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of a unit.

    Attributes:
        unit: Its id.
        answers: Of an ``ask`` one; of a ``shrink`` that found a smaller Case, that one.
        units: Further work that follows from it, in order.
        facts: Of a ``describe``: ``name``, ``summary``, ``absent``, and the ``environment``. With
            ``usage``, why nobody can do it before something is mended, it is no result: the run
            ends. Of a ``fault`` its ``score``, or that of a control.
        harness: What went wrong that is no kernel's fault, in one line; empty where nothing.
        seconds: From start to end.
        attempts: How often it was begun.
    """

    unit: str
    answers: tuple[Answer, ...] = ()
    units: tuple[Unit, ...] = ()
    facts: dict[str, Any] = {}
    harness: str = ""
    seconds: float = 0.0
    attempts: int = 1

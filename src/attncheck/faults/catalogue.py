"""All faults and controls, by id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.errors import UnknownName
from attncheck.faults import entries

if TYPE_CHECKING:
    from attncheck.faults.fault import Control, Fault

__all__ = ["CONTROLS", "FAULTS", "fault_named"]

FAULTS: dict[str, Fault] = {fault.id: fault for fault in entries.FAULTS}
"""Every fault, category by category."""

CONTROLS: dict[str, Control] = {control.id: control for control in entries.CONTROLS}
"""Changes that leave a kernel right: nothing may flag them."""


def fault_named(name: str) -> Fault | Control:
    """The fault or control called ``name``; raises UnknownName with the valid ones."""
    everything = FAULTS | CONTROLS
    if name not in everything:
        raise UnknownName("fault", name, everything)
    return everything[name]

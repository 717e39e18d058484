"""Kernels with one fault each, by name, which properties, relations and probes must catch.

A fault is the set of attributes that a subclass of the ideal kernel overrides: it reads other
inputs, spoils right outputs, or computes one step differently.
"""

from tests.planted_kernels.inputs_read import READ, SINKS
from tests.planted_kernels.keys_in_parts import DECODING, PAGES, Gathering, Splits
from tests.planted_kernels.other_steps import (
    BLOCK,
    CAPTURED,
    GRADIENTS,
    STEPS,
    STEPS_OF_PROBLEM,
    OfProblem,
)
from tests.planted_kernels.outputs_given import GIVEN, LEFT

from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

FAULTS = (
    (Ideal, READ | SINKS | GIVEN | LEFT | STEPS),
    (Ideal, {f"gradients.{name}": kind for name, kind in GRADIENTS.items()}),
    (OfProblem, STEPS_OF_PROBLEM),
    (OfProblem, {f"gradients.{name}": kind for name, kind in CAPTURED.items()}),
    (Splits, DECODING),
    (Gathering, PAGES),
)
"""Each table of faults, with the base class of its kernels."""


def kernel(name: str, block: int = BLOCK) -> Ideal:
    """The kernel with the fault ``name``, in square tiles of ``block`` or the fault's own size."""
    base, attributes = next((base, kinds[name]) for base, kinds in FAULTS if name in kinds)
    block = attributes.get("block", block)
    own = {"name": f"planted-{name}"} | attributes
    return type(name, (base,), own)(Tiling(block_query=block, block_kv=block))

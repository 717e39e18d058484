"""Strides: transposed, sliced, padded, expanded, with an offset, beyond 32 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.relations import RELATIONS
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest

STRIDES = tuple(name for name in RELATIONS if name.startswith("strides"))


@asks(*STRIDES, families=("full", "causal"))
def test_strides_do_not_matter(kernel: UnderTest, case: Case) -> None:
    """The same numbers laid out otherwise in memory give the same bits."""
    kernel.must_hold(case)

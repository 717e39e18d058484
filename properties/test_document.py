"""Packed documents: a row sees the keys of its own document alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.suite import UnderTest


@asks("compare", families=("document",))
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is that of exact attention within documents up to rounding."""
    kernel.must_hold(case)


@asks("decode", "isolated", families=("document",))
def test_rows_see_their_keys(kernel: UnderTest, case: Case) -> None:
    """Each row counts the keys of its own document, the empty ones among them left out."""
    kernel.must_hold(case)


@asks("documents", families=("document",))
def test_documents_one_by_one(kernel: UnderTest, case: Case) -> None:
    """Documents packed give what each gives alone."""
    kernel.must_hold(case)


@asks("hidden_keys", families=("document",), shapes={"shortest_kv": 2})
def test_other_documents_do_not_matter(kernel: UnderTest, case: Case) -> None:
    """No bit of a document moves when another one's keys and values are others."""
    kernel.must_hold(case)

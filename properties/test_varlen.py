"""Packed documents of different lengths, as for kernels that take ``cu_seqlens``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.cases.strategies.score_strategies import scores
from attncheck.subjects.conventions.layouts import pack
from attncheck.suite import asks

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite import UnderTest

RAGGED = ("document", "documents", "padding", "documents_bottom_right", "bottom_right")


def lengths(problem: Problem) -> list[tuple[int, int]]:
    """Return the numbers of rows and keys of each document, or of each sequence of a batch."""
    found = pack(problem)
    return found.lengths() if found else []


def ragged(problem: Problem) -> bool:
    """Return whether documents differ in length, or some keys are padding."""
    by_length = problem.mask.name in {"padding", "bottom_right"}
    whole = {(problem.query, problem.kv)} if by_length else set()
    return len({*lengths(problem), *whole}) > 1


def one_sided(problem: Problem) -> bool:
    """Return whether a document has rows and no keys, or keys and no rows."""
    return any(max(both) > 0 == min(both) for both in lengths(problem))


def rows_alone(problem: Problem) -> bool:
    """Return whether a document has rows and no keys."""
    return any(rows > 0 == keys for rows, keys in lengths(problem))


def alone(problem: Problem) -> bool:
    """Return whether one document has all rows and keys."""
    return (problem.query, problem.kv) in lengths(problem)


@asks("compare", families=RAGGED, where=ragged)
def test_attention_is_exact(kernel: UnderTest, case: Case) -> None:
    """Every element, and LSE, is that of exact attention within documents up to rounding."""
    kernel.must_hold(case)


@asks("decode", "isolated", families=("documents", "packed"))
def test_rows_see_their_keys(kernel: UnderTest, case: Case) -> None:
    """Each row counts the keys of its own document and none of the neighbours'."""
    kernel.must_hold(case)


@asks("documents", families=("document", "documents", "packed"), where=ragged)
def test_documents_one_by_one(kernel: UnderTest, case: Case) -> None:
    """Documents packed give what each gives alone, whatever stands before it."""
    kernel.must_hold(case)


@asks("hidden_keys", families=RAGGED, where=ragged, shapes={"shortest_kv": 2})
def test_other_documents_do_not_matter(kernel: UnderTest, case: Case) -> None:
    """No bit of a document moves when another one's keys and values are others."""
    kernel.must_hold(case)


@asks("compare", families=("documents", "packed"), scores=scores)
def test_positions_reach_score_mods(kernel: UnderTest, case: Case) -> None:
    """A score mod reads the indices and the sequence that the whole has, in each document."""
    kernel.must_hold(case)


@asks("compare", families=("documents", "padding"), where=one_sided)
def test_beside_empty_documents_it_is_exact(kernel: UnderTest, case: Case) -> None:
    """A document without rows, or without keys, moves no other one."""
    kernel.must_hold(case)


@asks("empty_rows", families=("documents", "padding"), where=rows_alone)
def test_documents_without_keys_are_zero(kernel: UnderTest, case: Case) -> None:
    """Rows of a document without keys give 0 and an LSE of −∞."""
    kernel.must_hold(case)


@asks("compare", families=("document", "documents"), where=alone)
def test_a_lone_document_is_exact(kernel: UnderTest, case: Case) -> None:
    """One document of everything is plain attention."""
    kernel.must_hold(case)


@asks("compare", families=("documents", "packed"), backward=True, dlse=None)
def test_gradients_are_exact(kernel: UnderTest, case: Case) -> None:
    """Gradients too are those of each document alone, from either corner."""
    kernel.must_hold(case)


@asks("compare", families=("documents",), where=one_sided, backward=True)
def test_gradients_beside_empty_documents(kernel: UnderTest, case: Case) -> None:
    """Keys of a document without rows, and rows of one without keys, have gradients of 0."""
    kernel.must_hold(case)


@asks("compare", families=("packed",))
def test_many_documents_are_exact(kernel: UnderTest, case: Case) -> None:
    """Many documents, of one row and key each too, and causal in each from either corner."""
    kernel.must_hold(case)

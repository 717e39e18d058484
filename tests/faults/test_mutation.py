"""Mutation operators: what each makes of a small kernel, and which mutants are discarded."""

from __future__ import annotations

import ast

import pytest

from attncheck.core.errors import UnknownName, UsageError
from attncheck.faults.mutation import OPERATORS, mutants_of

KERNEL = '''
"""One of each."""

import torch


def kernel(q, k, v, stride_qb, stride_kb, n):
    batch = tl.program_id(0)
    head = tl.program_id(1) // 2
    for start in range(0, n, 16):
        cols = start + tl.arange(0, 16)
        x = tl.load(k + batch * stride_kb + cols[:, None], mask=cols < n)
        s = tl.dot(q, tl.trans(x)) * 0.125
        s = tl.where((cols < n) & (cols <= start), s, -float("inf"))
        top = tl.maximum(top, tl.max(s, 1))
        acc = acc * alpha + tl.dot(p, v)
        total -= tl.sum(p, 1)
    if n > 4:
        acc = acc / total
    tl.store(v, acc)
    if n < 1:
        raise ValueError(f"{n - 1} is too few")
    return acc
'''


def mutated_lines(operator, source=KERNEL):
    """The new text of the line that each mutant of one operator changes."""
    return [
        line[1:].strip()
        for mutant in mutants_of("k", source, (operator,))
        for line in mutant.diff.splitlines()
        if line.startswith("+")
    ]


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        ("off-by-one", "for start in range(0, (n + 1), 16):"),
        ("off-by-one", "x = tl.load(k + batch * stride_kb + cols[:, None], mask=cols < (n - 1))"),
        ("swap-operands", "acc = (total / acc)"),
        ("swap-operands", 's = tl.where((cols < n) & (cols <= start), -float("inf"), s)'),
        ("flip-comparison", 's = tl.where(((cols <= n)) & (cols <= start), s, -float("inf"))'),
        ("drop-statement", "pass"),
        ("wrong-index", "x = tl.load(k + batch * stride_qb + cols[:, None], mask=cols < n)"),
        ("wrong-index", "x = tl.load(v + batch * stride_kb + cols[:, None], mask=cols < n)"),
        ("wrong-index", "batch = tl.program_id(1)"),
        ("narrow-dtype", "acc = (acc * alpha + tl.dot(p, v)).to(torch.float16).to(torch.float32)"),
        ("drop-mask", "x = tl.load(k + batch * stride_kb + cols[:, None])"),
        ("drop-mask", 's = tl.where((cols < n), s, -float("inf"))'),
        ("change-constant", "s = tl.where((cols < n) & (cols <= start), s, -10000.0)"),
        ("change-constant", "s = tl.dot(q, tl.trans(x)) * 1.0"),
        ("drop-term", "acc = acc * alpha"),
        ("drop-term", "acc = acc + tl.dot(p, v)"),
        ("flip-operator", "total += tl.sum(p, 1)"),
        ("swap-function", "total -= tl.max(p, 1)"),
        ("swap-function", "top = tl.minimum(top, tl.max(s, 1))"),
        ("transpose", "s = tl.dot(q, x) * 0.125"),
        ("transpose", "x = tl.load(k + batch * stride_kb + cols[None, :], mask=cols < n)"),
    ],
)  # fmt: skip
def test_operator_makes_the_mutant(operator, line):
    """Compared as syntax trees: redundant brackets do not matter."""
    made = mutated_lines(operator)
    if line.endswith(":"):
        assert line in made
    else:
        trees = {ast.dump(ast.parse(each)) for each in made if not each.endswith(":")}
        assert ast.dump(ast.parse(line)) in trees


def test_every_operator_changes_the_small_kernel():
    """An operator that never matches would go unnoticed."""
    assert {mutant.operator for mutant in mutants_of("k", KERNEL)} == set(OPERATORS)


def test_mutants_are_distinct_programs_with_unique_ids():
    mutants = mutants_of("k", KERNEL)
    programs = [ast.dump(ast.parse(mutant.text)) for mutant in mutants]
    assert len(set(programs)) == len(programs) == len({mutant.id for mutant in mutants})
    assert ast.dump(ast.parse(KERNEL)) not in programs
    assert all(mutant.id.startswith(f"k:{mutant.operator}:{mutant.line}:") for mutant in mutants)


def test_unchanged_source_is_no_mutant(monkeypatch):
    """It would be scored as a fault that is always missed."""
    monkeypatch.setitem(OPERATORS, "drop-term", lambda site: iter([site.node]))
    assert mutants_of("k", KERNEL, ("drop-term",)) == []


def test_mutants_are_deterministic():
    assert mutants_of("k", KERNEL) == mutants_of("k", KERNEL)


def test_raise_statements_are_not_mutated():
    assert not any("too few" in mutant.diff for mutant in mutants_of("k", KERNEL))


def test_change_after_multibyte_characters_is_placed_by_bytes():
    source = 'def f(a, b):\n    s = "ß→∞"; c = a - b\n    return c\n'
    (line,) = mutated_lines("swap-operands", source)
    assert line == 's = "ß→∞"; c = (b - a)'


def test_invalid_python_or_operator_is_refused():
    with pytest.raises(UsageError, match="k is no Python"):
        mutants_of("k", "def f(:")
    with pytest.raises(UnknownName, match="operator 'drop'"):
        mutants_of("k", KERNEL, ("drop",))

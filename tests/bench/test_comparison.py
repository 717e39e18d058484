"""Comparison of timings: findings (faster, slower, same, unclear) keep the stated error chance."""

import itertools
import math

import numpy as np
import pytest

from attncheck.bench.comparison import CHANCE, MARGIN, finding_of, ratio_interval, time_changes
from attncheck.bench.measure import count_work
from attncheck.inputs.problem import Case, Problem
from attncheck.records.bench_report import BenchCell, BenchRow, Times
from attncheck.records.record import Record

PROBLEM = Problem(query=8, head_dim=8, backward=True)


def row(kernel, seconds):
    record = Record(
        case_id="id",
        case=Case(problem=PROBLEM).to_json(),
        kernel=kernel,
        variant="full",
        heads="MHA",
        status="pass",
        environment="",
    )
    times = Times(seconds=tuple(map(float, seconds)), clock="cpu")
    return BenchRow(record=record, forward=times)


def cell(new, old):
    return BenchCell(
        table="own",
        case_id="id",
        case=Case(problem=PROBLEM).to_json(),
        variant="full",
        heads="MHA",
        work=count_work(PROBLEM, "cpu"),
        rows=(row("mine", new), row("mine @main", old)),
    )


def noisy(draws, rounds, factor=1.0):
    """Times with a drift common to all kernels, and with jitter and spikes of their own."""
    drift = 1e-3 * (1 + 0.3 * np.sin(np.arange(rounds) / 5))
    jitter = 1 + np.abs(draws.normal(0, 0.01, rounds))
    spikes = np.where(draws.random(rounds) < 0.1, 1.5, 1.0)
    return factor * drift * jitter * spikes


def findings_of(factor, seed, rounds=40):
    draws = np.random.default_rng(seed)
    cells = [cell(noisy(draws, rounds, factor), noisy(draws, rounds)) for _ in range(4)]
    return [change.finding for change in time_changes(cells, {"mine": "mine @main"})]


@pytest.mark.parametrize(("factor", "expected"), [(1.1, "slower"), (0.9, "faster"), (1.0, "same")])
def test_planted_change_is_found_and_equal_times_are_the_same(factor, expected):
    findings = [one for seed in range(10) for one in findings_of(factor, seed)]
    assert findings.count(expected) > 0.9 * len(findings)
    assert set(findings) <= {expected, "unclear"}


def test_few_rounds_are_unclear():
    assert set(findings_of(1.5, 0, rounds=5)) == {"unclear"}


def test_interval_misses_the_median_at_most_with_the_stated_chance():
    """Counted over all equally likely signs; the next narrower interval would exceed the chance."""
    for count, chance in itertools.product((6, 9, 14), (0.5, 0.1, 0.01)):
        interval = ratio_interval(range(1, count + 1), chance)
        if interval is None:
            assert 2 * 0.5**count > chance
            continue
        k = interval[0]
        # The median is outside if fewer than k of the values lie on one side of it.
        missed = 2 * sum(math.comb(count, j) for j in range(k)) / 2**count
        assert missed <= chance < missed + 2 * math.comb(count, k) / 2**count
        assert interval[1] == count + 1 - k


def test_chance_is_divided_among_all_comparisons():
    draws = np.random.default_rng(0)
    one = [cell(noisy(draws, 20, 1.02), noisy(draws, 20))]
    alone, *_ = time_changes(one, {"mine": "mine @main"})
    among, *_ = time_changes(one * 50, {"mine": "mine @main"})
    assert among.interval[0] < alone.interval[0]
    assert alone.interval == ratio_interval(
        [a / b for a, b in zip(*(r.forward.seconds for r in one[0].rows), strict=True)], CHANCE
    )


@pytest.mark.parametrize(
    ("interval", "finding"),
    [
        (None, "unclear"),
        ((0.5, 0.99), "faster"),
        ((1.001, 1.2), "slower"),
        ((1 / (1 + MARGIN), 1 + MARGIN), "same"),
        ((0.97, 1.001), "unclear"),
        ((1.001, 1 + MARGIN), "same"),
    ],
)
def test_finding_of_an_interval(interval, finding):
    assert finding_of(interval) == finding

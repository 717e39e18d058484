"""The benchmark of acceptance rules: its rows, tasks, page and measure of a fault's effect."""

import json
import math
from types import SimpleNamespace

import pytest
import rules
import rules_page
import torch
from peers import PEERS
from planted import FAULTS
from rules import Task, compared, merged, probed, tasks
from spread import Spread, difference

from attncheck.core.outputs import Outputs


def task(**changes):
    fields = {"device": "cpu", "dtype": "fp16", "length": 70, "seed": 1, "mask": "causal"}
    fields |= {"heads": (2, 1), "probes": False}
    return Task(**(fields | changes))


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rules.OTHERS, "cpu", ("sdpa-math",))  # interpreted kernels take seconds
        return compared(task())


def test_right_kernels_pass_and_faults_of_the_mask_fail(rows):
    right = {row["name"]: row["status"] for row in rows if row["kind"] == "right"}
    assert {"ideal lazy", "ideal flash1", "ideal reverse", "sdpa-math"} <= set(right)
    assert set(right.values()) == {"pass"}
    wrong = {row["name"]: row for row in rows if row["kind"] == "fault"}
    assert set(wrong) == {fault.name for fault in FAULTS if fault.mask == "causal"}
    for name in ("causal +1", "causal -1", "top-left for bottom-right"):
        assert wrong[name]["status"] == "fail"
        assert wrong[name]["effect"] > 1
    assert all(set(row["peers"]) == set(PEERS) for row in rows)


def test_probes_fail_causal_faults_and_no_right_kernel(monkeypatch):
    monkeypatch.setitem(rules.OTHERS, "cpu", ())
    monkeypatch.setattr(rules, "PROBES", {name: rules.PROBES[name] for name in ("decode", "ones")})
    rows = probed(task(probes=True, length=40))
    assert {row["status"] for row in rows if row["kind"] == "right"} <= {"pass", "unsupported"}
    for name in ("causal +1", "causal -1"):
        assert "fail" in {row["status"] for row in rows if row["name"] == name}


HEADER = {"environments": [{"device": "cpu", "torch": "2", "triton": "", "python": "3"}]}
HEADER |= {"done": 1, "of": 2}


def test_every_fault_has_tasks_with_and_without_probes_in_each_of_its_dtypes():
    dtypes = ("fp32", "e4m3")
    options = SimpleNamespace(device="cpu", lengths=[64, 32], seeds=2, only=None, dtypes=dtypes)
    all_tasks = tasks(options)
    for fault in FAULTS:
        for dtype in set(fault.dtypes) & set(dtypes):
            for probes in (False, True):
                some = [t for t in all_tasks if (t.dtype, t.probes) == (dtype, probes)]
                assert any(fault in t.faults for t in some)
    assert len(set(all_tasks)) == len(all_tasks)


def test_page_lists_right_kernels_that_fail(rows):
    page = rules_page.page(HEADER | {"rows": rows})
    assert "## Right kernels that attncheck fails\n\nNone." in page
    failing = rows[0] | {"status": "fail", "case": {"problem": 1}}
    page = rules_page.page(HEADER | {"rows": [failing, *rows[1:]]})
    assert f"* {rows[0]['name']}" in page
    assert '{"problem": 1}' in page


def row_of(page, name):
    return next(line for line in page.splitlines() if line.startswith(f"| {name} |"))


def test_page_tells_where_another_rule_catches_a_fault_that_attncheck_misses(rows):
    """A rule that also rejects a right kernel on the same problem does not count."""
    name = "causal +1"
    fault = next(row for row in rows if row["name"] == name)
    missed = fault | {"status": "pass"}
    others = [row for row in rows if row is not fault]
    page = rules_page.page(HEADER | {"rows": [*others, missed]})
    assert "BEHIND; 1 of 1 missed are visible" in row_of(page, name)
    peers = dict.fromkeys(PEERS, False)
    all_rejected = [
        row | {"peers": peers} if row["kind"] == "right" else row
        for row in (*others, missed | {"effect": 0.5})
    ]
    page = rules_page.page(HEADER | {"rows": all_rejected})
    assert "level; missed are hidden" in row_of(page, name)


def test_files_are_merged_without_repeating_a_row(tmp_path, rows):
    for name, some in (("a", rows[:3]), ("b", rows[2:4])):
        (tmp_path / name).write_text(json.dumps(HEADER | {"rows": some}))
    result = merged([tmp_path / "a", tmp_path / "b"])
    assert len(result["rows"]) == 4
    assert (len(result["environments"]), result["done"], result["of"]) == (1, 2, 4)


def outputs(out, lse):
    return Outputs(
        torch.tensor(out, dtype=torch.float32).view(1, 1, 2, 1),
        torch.tensor(lse, dtype=torch.float32).view(1, 1, 2),
    )


def test_effect_of_a_fault_is_measured_in_units_of_the_right_kernels_spread():
    right = [outputs([1.0, 1.0], [0.0, 0.0]), outputs([1.0, 2.0], [0.0, 0.0])]
    spread = Spread(right)
    assert spread.effect(right[0], right[0]) == 0
    assert spread.effect(outputs([1.0, 1.5], [0.0, 0.0]), right[0]) == 0.5
    assert spread.effect(outputs([1.0, 4.0], [0.0, 0.0]), right[0]) == 3
    assert spread.effect(outputs([1.0, 1.0], [0.0, 1.0]), right[0]) == math.inf
    assert spread.effect(outputs([1.0, math.nan], [0.0, 0.0]), right[0]) == math.inf


def test_equal_infinities_are_no_difference():
    one = outputs([1.0, 1.0], [-math.inf, 0.0])
    assert difference(one, one) == [0, 0, 0, 0]
    assert difference(one, outputs([1.0, 1.0], [0.0, 0.0]))[2] == math.inf

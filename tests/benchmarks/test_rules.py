"""The benchmark of rules: kernels are judged as everywhere, and the page says what was found."""

import math

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
    given = {"device": "cpu", "dtype": "fp16", "length": 70, "seed": 1, "mask": "causal"}
    given |= {"heads": (2, 1), "probes": False}
    return Task(**(given | changes))


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


def test_a_probe_fails_the_same_faults_and_no_right_kernel(monkeypatch):
    monkeypatch.setitem(rules.OTHERS, "cpu", ())
    monkeypatch.setattr(rules, "PROBES", {name: rules.PROBES[name] for name in ("decode", "ones")})
    found = probed(task(probes=True, length=40))
    assert {row["status"] for row in found if row["kind"] == "right"} <= {"pass", "unsupported"}
    for name in ("causal +1", "causal -1"):
        assert "fail" in {row["status"] for row in found if row["name"] == name}


ABOUT = {"environments": [{"device": "cpu", "torch": "2", "triton": "", "python": "3"}]}
ABOUT |= {"done": 1, "of": 2}


class Asked:
    device, lengths, seeds, only = "cpu", [64, 32], 2, None
    dtypes = ("fp32", "e4m3")


def test_every_fault_has_a_task_in_each_of_its_dtypes():
    asked = tasks(Asked())
    for fault in FAULTS:
        for dtype in set(fault.dtypes) & set(Asked.dtypes):
            for probes in (False, True):
                some = [t for t in asked if (t.dtype, t.probes) == (dtype, probes)]
                assert any(fault in t.faults for t in some)
    assert len(set(asked)) == len(asked)


def test_page_names_a_right_kernel_that_is_refused(rows):
    good = rules_page.page(ABOUT | {"rows": rows})
    assert "## Right kernels that attncheck fails\n\nNone." in good
    wrong = [row | {"status": "fail", "case": {"problem": 1}} for row in rows[:1]]
    bad = rules_page.page(ABOUT | {"rows": [*wrong, *rows[1:]]})
    assert f"* {rows[0]['name']}" in bad
    assert '{"problem": 1}' in bad


def line(page, name):
    return next(text for text in page.splitlines() if text.startswith(f"| {name} |"))


def test_page_says_who_is_behind(rows):
    """A rule that refuses a right kernel on the same problem has told nothing."""
    name = "causal +1"
    fault = next(row for row in rows if row["name"] == name)
    quiet = fault | {"status": "pass"}
    others = [row for row in rows if row is not fault]
    shown = rules_page.page(ABOUT | {"rows": [*others, quiet]})
    assert "BEHIND; 1 of 1 missed are visible" in line(shown, name)
    peers = dict.fromkeys(PEERS, False)
    all_refused = [
        row | {"peers": peers} if row["kind"] == "right" else row
        for row in (*others, quiet | {"effect": 0.5})
    ]
    shown = rules_page.page(ABOUT | {"rows": all_refused})
    assert "level; missed are hidden" in line(shown, name)


def test_files_are_merged_without_repeating_a_row(tmp_path, rows):
    import json

    for name, some in (("a", rows[:3]), ("b", rows[2:4])):
        (tmp_path / name).write_text(json.dumps(ABOUT | {"rows": some}))
    found = merged([tmp_path / "a", tmp_path / "b"])
    assert len(found["rows"]) == 4
    assert (len(found["environments"]), found["done"], found["of"]) == (1, 2, 4)


def outputs(out, lse=None):
    shape = torch.tensor(out, dtype=torch.float32).view(1, 1, 2, 1)
    given = None if lse is None else torch.tensor(lse, dtype=torch.float32).view(1, 1, 2)
    return Outputs(shape, given)


def test_an_effect_is_counted_in_units_of_the_spread():
    right = [outputs([1.0, 1.0], [0.0, 0.0]), outputs([1.0, 2.0], [0.0, 0.0])]
    spread = Spread(right)
    assert spread.effect(right[0], right[0]) == 0
    assert spread.effect(outputs([1.0, 1.5], [0.0, 0.0]), right[0]) == 0.5
    assert spread.effect(outputs([1.0, 4.0], [0.0, 0.0]), right[0]) == 3
    assert spread.effect(outputs([1.0, 1.0], [0.0, 1.0]), right[0]) == math.inf
    assert spread.effect(outputs([1.0, math.nan], [0.0, 0.0]), right[0]) == math.inf


def test_infinities_that_agree_are_no_difference():
    one = outputs([1.0, 1.0], [-math.inf, 0.0])
    assert difference(one, one) == [0, 0, 0, 0]
    assert difference(one, outputs([1.0, 1.0], [0.0, 0.0]))[2] == math.inf

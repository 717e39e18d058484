"""Baseline files: the round trip through text, and the refusal of damaged files."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.baseline.planted_losses import ENVIRONMENT
from tests.messages import one_line

from attncheck.core.errors import UsageError
from attncheck.inputs.problem import Case, Problem
from attncheck.records.baseline_entries import (
    Baseline,
    BaselineTensor,
    Entry,
    architecture,
    baseline_text,
    make_baseline,
    read_baseline,
)
from attncheck.records.record import Environment

GPU = replace(ENVIRONMENT, device="NVIDIA H100", capability="9.0", cuda="13.0")
TENSOR = BaselineTensor(
    rmse=1.25e-3, ideal=1.2e-3, floor=1.1e-3, relative=1.01, freedom=512.0, ensemble=(0.99, 1.02)
)


def entry(case: str = "case1", kernel: str = "mine", where: Environment = ENVIRONMENT) -> Entry:
    return Entry(
        kernel=kernel,
        variant="causal",
        dtype="bf16",
        case=case,
        device=architecture(where),
        status="pass",
        digest="0123456789abcdef" * 2,
        tensors={"out": TENSOR},
        over_bound=0.31,
        versions=where.id,
    )


def baseline(*entries: Entry) -> Baseline:
    environments = {one.id: one for one in (ENVIRONMENT, GPU)}
    return make_baseline(entries or (entry(),), environments, "0.1.0")


def test_baseline_round_trips_through_text_and_file(tmp_path):
    original = baseline(entry("b"), entry("a"), entry("a", where=GPU), entry("a", "another"))
    assert read_baseline(baseline_text(original)) == original
    path = tmp_path / "attncheck-baseline.json"
    path.write_text(baseline_text(original))
    assert read_baseline(path) == original
    assert baseline_text(read_baseline(path)) == baseline_text(original)


def test_entry_keeps_its_case_and_must_match_its_id():
    case = Case(problem=Problem(query=3))
    original = baseline(replace(entry(case.id), asked=case.to_json()))
    assert read_baseline(baseline_text(original)) == original
    with pytest.raises(UsageError, match="another Case than its id says"):
        read_baseline(baseline_text(baseline(replace(entry("another"), asked=case.to_json()))))


def test_text_has_one_sorted_entry_per_line():
    """Adding an entry adds exactly one line, so that Git merges branches that add others."""
    one, two = (
        baseline_text(baseline(entry("a"), entry("c"))),
        baseline_text(baseline(entry("c"), entry("a"))),
    )
    assert one == two
    more = baseline_text(baseline(entry("a"), entry("b"), entry("c"))).splitlines()
    assert [line for line in more if line not in one.splitlines()] == [more[-4]]
    assert json.loads(more[-4].rstrip(","))["case"] == "b"


def test_same_case_on_two_architectures_is_two_entries():
    entries = baseline(entry(), entry(where=GPU)).entries
    assert {one.device for one in entries} == {"x86_64", "sm 9.0"}


def test_kernel_name_with_lone_surrogate_is_stored_escaped():
    read = read_baseline(baseline_text(baseline(entry(kernel="mine\ud800\x1b[31m</script>"))))
    assert read.entries[0].kernel == "mine\\ud800\x1b[31m</script>"


def _change_json(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def damage(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return damage


def _repeat_entry(text: str) -> str:
    line = next(line for line in text.splitlines() if '"kernel"' in line)
    return text.replace(line, f"{line},\n{line}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda text: "", "no baseline", id="empty"),
        pytest.param(lambda text: text[: len(text) // 2], "no baseline", id="cut off"),
        pytest.param(lambda text: f"<<<<<<< HEAD\n{text}", "no baseline", id="merge conflict"),
        pytest.param(lambda text: "[]", "schema is None", id="no object"),
        pytest.param(lambda text: "[" * 100_000, "", id="deep"),
        pytest.param(
            lambda text: text.replace('"schema": 1', '"schema": 2'), "schema is 2", id="later"
        ),
        pytest.param(
            lambda text: text.replace('"schema": 1', '"schema": true'), "schema is True", id="true"
        ),
        pytest.param(
            lambda text: text.replace("0.00125", "0.00126"), "changed by hand", id="number"
        ),
        pytest.param(lambda text: text.replace('"pass"', '"warn"'), "changed by hand", id="status"),
        pytest.param(
            lambda text: text.replace("2.11.0", "2.12.0"), "changed by hand", id="versions"
        ),
        pytest.param(
            lambda text: text.replace('"rmse": 0.00125', '"rmse": 9.0, "rmse": 0.00125'),
            "'rmse' is there twice",
            id="name twice",
        ),
        pytest.param(_repeat_entry, "is there twice: delete one", id="entry twice"),
        pytest.param(
            _change_json(lambda d: d.update(extra=1)), "unknown field", id="unknown field"
        ),
        pytest.param(_change_json(lambda d: d.pop("entries")), "missing required", id="no entries"),
        pytest.param(
            _change_json(lambda d: d.update(environments={})),
            "environment that is not",
            id="nowhere",
        ),
        pytest.param(
            lambda text: baseline_text(baseline(replace(entry(), over_bound=-1.0))),
            "number or digest that cannot be",
            id="negative",
        ),
        pytest.param(
            lambda text: baseline_text(baseline(replace(entry(), digest="../etc"))),
            "number or digest that cannot be",
            id="no digest",
        ),
    ],
)
def test_damaged_file_is_refused_in_one_line(damage, message, tmp_path):
    path = tmp_path / "attncheck-baseline.json"
    path.write_text(damage(baseline_text(baseline())))
    with one_line(UsageError, message, start="baseline invalid: "):
        read_baseline(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"^baseline invalid: .*cannot be read"):
        read_baseline(tmp_path / "nowhere.json")

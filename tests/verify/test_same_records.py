"""The command line, the Python API and the gate make the same Records of the same cases."""

import json

import pytest
from click.testing import CliRunner

import attncheck
from attncheck.cases.check_cases import check_cases
from attncheck.cases.tier import TIERS
from attncheck.cli.check import check
from attncheck.core.json_numbers import to_plain_data
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.planning import Choices
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.named_kernels import builtin_names, subject_named
from attncheck.verify.verify import verify
from attncheck.workers.units import Unit

pytestmark = pytest.mark.usefixtures("forked_workers")

SMALL = Problem(heads=2, kv_heads=1, query=3, kv=5, head_dim=16, dtype="bf16")
CLI_QUESTIONS = ("one-key", "decode-one-query")
CASES = {each.name: each.case for each in check_cases("bf16") if each.name in CLI_QUESTIONS} | {
    "softmax": Case(problem=Problem(operation="softmax", query=3, kv=5)),
    "backward": Case(problem=SMALL.replace(backward=True)),
    "repeat": Case(problem=SMALL, question="repeat"),
    "state": Case(problem=SMALL, question="state"),
}
RUN_DEPENDENT = {"seconds", "environment", "variant"}


def facts(record) -> dict:
    """The fields of a Record, except for its time, environment and variant."""
    fields = record if isinstance(record, dict) else json.loads(json.dumps(to_plain_data(record)))
    return {key: value for key, value in fields.items() if key not in RUN_DEPENDENT}


@pytest.mark.parametrize("name", builtin_names())
def test_verify_python_gate_and_command_line_give_the_same_record(name):
    gate, subject = (
        GateWorker(Choices(tier=TIERS["smoke"], isolated=False)),
        subject_named(name),
    )
    by_name = {}
    for named, case in CASES.items():
        (loop,) = verify(subject, [case], device="cpu").records
        (python,) = attncheck.check(name, case, device="cpu")
        unit = Unit(kind="ask", stage="bounds", kernel=name, device="cpu", case=case.to_json())
        (answer,) = gate.do(unit).answers
        assert facts(python) == facts(loop) == facts(answer.record)
        by_name[named] = facts(loop)
    questions = [part for question in CLI_QUESTIONS for part in ("--question", question)]
    arguments = [name, *questions, "--device", "cpu", "--format", "json"]
    result = CliRunner().invoke(check, [*arguments, "--quiet"], catch_exceptions=False)
    records = json.loads(result.stdout)["records"]
    assert {r["variant"] for r in records} == set(CLI_QUESTIONS)
    for record in records:
        assert facts(record) == by_name[record["variant"]]


def test_python_check_tests_a_kernel_for_pages_only():
    """The Python API once reported that nothing was tested where the command line tested it."""
    (record,) = attncheck.check("triton-paged", SMALL, device="cpu")
    assert (record.status, record.case["problem"]["paging"]["size"]) == ("pass", 16)

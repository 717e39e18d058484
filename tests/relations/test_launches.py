"""The relation ``launches``: which other launch is compared, and kernels that have none."""

import pytest

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.records.failure_causes import without_place
from attncheck.relations import relation_named
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.suite.kernel_support import is_askable
from attncheck.verify.run_case import run_case

PROBLEM = Problem(batch=2, query=40, head_dim=8, dtype="bf16", mask=Spec.of("causal"))


def tiled(block: int) -> Ideal:
    return Ideal(Tiling(block_query=block, block_kv=block))


class LastKeyUnseen(Ideal):
    name = "planted-last-key-unseen"

    def visible(self, mask, at):
        return mask(at.b, at.h, at.q_idx, at.kv_idx) & (at.kv_idx < 39)


class Launched(Ideal):
    """A right kernel; the last of its other launches is wrong."""

    name = "planted-launched"

    def launches(self, problem, device):
        assert (problem, device) == (PROBLEM, "cpu")
        return {"16": tiled(16), "32": tiled(32), "wrong": LastKeyUnseen()}


def ask(subject, launch: int):
    case = Case(problem=PROBLEM, question="launches", parameters={"launch": launch})
    return run_case(subject, case, device="cpu")


@pytest.mark.parametrize("launch", range(8))
def test_launch_parameter_wraps_around(launch):
    expected = "fail" if launch % 3 == 2 else "pass"
    assert ask(Launched(), launch).status == expected
    assert launch in relation_named("launches").allowed(PROBLEM)["launch"]


def test_wrong_launch_fails_within_bounds_at_its_row():
    record = ask(Launched(), 2)
    assert record.kernel == "planted-launched"
    assert record.judgement.rule == "relation"
    assert record.judgement.worst.at.query == 39
    assert "±" in record.judgement.reason  # bounds, not bits: other tiles round differently


def test_kernel_without_launches_is_unsupported():
    record = ask(Ideal(), 0)
    assert (record.status, record.reason) == ("unsupported", "has no launch but its own")
    assert not is_askable(Ideal(), ("launches",))
    assert is_askable(Ideal(), ("launches", "repeat"))
    assert is_askable(Ideal(), ("repeat",))
    assert is_askable(Launched(), ("launches",))


def test_exception_while_listing_launches_is_an_error():
    class Raising(Ideal):
        def launches(self, problem, device):
            raise KeyError("no such tile")

    record = ask(Raising(), 0)
    assert (record.status, without_place(record.reason)) == (
        "error",
        "asked for its launches it raised KeyError: 'no such tile'",
    )


def test_launch_that_refuses_problem_is_unsupported():
    class Refusing(Ideal):
        def launches(self, problem, device):
            class Never(Ideal):
                def unsupported(self, problem, device):
                    return "no such tiles here"

            return {"never": Never()}

    record = ask(Refusing(), 0)
    assert (record.status, record.reason) == ("unsupported", "no such tiles here")

"""Scoring one fault in one host: caught, missed, or no score where the code cannot run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from attncheck.faults import catalogue
from attncheck.faults.catalogue import Control, Fault, Host
from attncheck.faults.scoring import FaultScorer, rank_of
from attncheck.inputs.problem import Case
from attncheck.records.fault_scores import ControlScore, FaultScore
from attncheck.records.record import Explanation
from attncheck.workers.units import Unit

OWN = Path(__file__).with_name("faulty_kernels.py")
RESCALED = (
    "out = self.kernel.rescaled(run.out, alpha[..., None]) if steps.rescales_out else run.out"
)
BASE = "log2_e = math.log2(math.e)"


def fault(name, new, *, old=RESCALED):
    return Fault(
        id=name,
        category="online softmax",
        summary="as the test says",
        when="always",
        seen="something",
        reports="this test",
        ideal=Host(patch=f"-{old}\n+{new}\n", dtypes=("fp32",)),
    )


def control(name, new, **where):
    host = fault(name, new, **where).ideal
    return Control(id=name, summary="as the test says", why="it is right", ideal=host)


PLANTED = {
    "wrong": fault("wrong", "out = run.out"),  # of two tiles of keys and more
    "no-op": fault("no-op", RESCALED + "  # the same"),
    "broken": fault("broken", "out = run.out * nobody_knows"),
    "syntax": fault("syntax", "out = = run.out"),
    "absent": fault("absent", "out", old="a text that the source does not have"),
    "wrong-control": control("wrong-control", "log2_e = 1.5", old=BASE),
    "right-control": control("right-control", RESCALED + "  # the same"),
}


def score_planted(monkeypatch, name, *, stages="probes", host="ideal", file=""):
    planted = PLANTED.get(name)
    if planted is not None:
        everything = catalogue.FAULTS if isinstance(planted, Fault) else catalogue.CONTROLS
        monkeypatch.setitem(everything, name, planted)
    unit = Unit(
        kind="fault",
        stage="contract",
        kernel=f"{name}@{host}",
        device="cpu",
        dtype="fp32",
        tier="smoke",
    )
    done = FaultScorer(stages=stages, file=file).do(unit)
    assert not done.harness
    kind = ControlScore if done.facts["kind"] == "control" else FaultScore
    return msgspec.convert(done.facts["score"], kind)


def test_caught_fault_is_shrunk_and_rated_by_peer_rules(monkeypatch):
    score = score_planted(monkeypatch, "wrong")
    assert score.outcome == "caught"
    first, shrunk = score.caught.first, score.caught.shrunk
    assert (first.stage, first.status) == ("probes", "fail")
    assert 0 < score.problems < 40
    assert score.seconds > 0
    small, large = (Case.from_json(each.case).problem for each in (shrunk, first))
    assert small.query * small.kv < large.query * large.kv
    assert {peer.rule for peer in score.peers} == {"allclose(1e-2)", "2×", "1.1× mean"}
    assert score.environment


def test_patch_without_effect_is_missed(monkeypatch):
    score = score_planted(monkeypatch, "no-op", stages="contract")
    assert (score.outcome, score.caught) == ("missed", None)
    assert score.problems > 1
    assert not any(peer.caught for peer in score.peers)
    assert any(peer.problems for peer in score.peers)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("broken", "NameError"), ("syntax", "SyntaxError"), ("absent", "0 times, not once")],
)
def test_fault_that_cannot_be_planted_or_run_is_not_caught(monkeypatch, name, reason):
    score = score_planted(monkeypatch, name)
    assert score.outcome == "harness"
    assert reason in score.reason


def test_wrong_control_is_flagged(monkeypatch):
    score = score_planted(monkeypatch, "wrong-control", stages="contract")
    assert score.outcome == "flagged"
    assert score.flagged
    assert {each.status for each in score.flagged} == {"fail"}


def test_right_control_is_clean(monkeypatch):
    score = score_planted(monkeypatch, "right-control", stages="contract")
    assert (score.outcome, score.flagged) == ("clean", ())
    assert score.problems > 1


def test_kernel_that_supports_no_problem_has_no_score(monkeypatch, tmp_path):
    file = tmp_path / "nothing.py"
    file.write_text(
        "from attncheck.subjects.ideal import Ideal\n\n\nclass Nothing(Ideal):\n"
        "    name, summary = 'nothing', 'takes nothing'\n\n"
        "    def unsupported(self, problem, device):\n        return 'too much'\n"
    )
    score = score_planted(monkeypatch, "Nothing", host="file", file=str(file), stages="probes")
    assert score.outcome == "harness"
    assert "nothing was asked" in score.reason


def test_peer_rule_that_fails_the_right_kernel_too_catches_nothing(monkeypatch):
    score = score_planted(monkeypatch, "none", host="file", file=str(OWN))
    assert score.outcome == "missed"
    mean = next(peer for peer in score.peers if peer.rule == "1.1× mean")
    assert mean.alarms > 0
    assert not mean.caught


def test_rank_is_that_of_the_first_matching_model():
    diagnosis = tuple(
        Explanation(model=model, sentence=model, share=0.5, explains_all=False)
        for model in ("a", "b", "c")
    )
    assert rank_of(diagnosis, ("c", "b")) == 2
    assert rank_of(diagnosis, ("d",)) == rank_of((), ("a",)) == 0

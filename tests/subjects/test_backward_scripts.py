"""A script that is asked without attncheck asks for out and LSE: of gradients there is none."""

from __future__ import annotations

import pytest

from attncheck.errors import UsageError
from attncheck.examine.answer import answered
from attncheck.problem import Case, Problem
from attncheck.runner import standalone
from attncheck.subjects.ideal import Ideal


def test_a_script_of_gradients_is_refused_in_one_line(tmp_path):
    asked = {"kernel": "ideal", "convention": "", "device": "cpu", "facts": {}}
    plain = Case(problem=Problem(query=16, head_dim=16, dtype="fp32"))
    record = answered(Ideal(), plain, device="cpu")
    path = tmp_path / "repro.py"
    assert standalone.script(Ideal(), plain, record, path=path, **asked)
    case = Case(problem=plain.problem.replace(backward=True))
    with pytest.raises(UsageError, match=r"^the script would ask for out and LSE: .*gradients\.$"):
        standalone.script(Ideal(), case, record, path=path, **asked)

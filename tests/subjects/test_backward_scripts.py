"""A script that is asked without attncheck asks for out and LSE: of gradients there is none."""

import pytest

from attncheck.core.errors import UsageError
from attncheck.diagnose import standalone_script
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify.run_case import run_case


def test_a_script_of_gradients_is_refused_in_one_line(tmp_path):
    asked = {"kernel": "ideal", "convention": "", "device": "cpu", "facts": {}}
    plain = Case(problem=Problem(query=16, head_dim=16, dtype="fp32"))
    record = run_case(Ideal(), plain, device="cpu")
    path = tmp_path / "repro.py"
    assert standalone_script.render_script(Ideal(), plain, record, path=path, **asked)
    case = Case(problem=plain.problem.replace(backward=True))
    with pytest.raises(UsageError, match=r"^the script would ask for out and LSE: .*gradients\.$"):
        standalone_script.render_script(Ideal(), case, record, path=path, **asked)

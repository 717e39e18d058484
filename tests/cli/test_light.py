"""Help, lists and shell completion import nothing heavy, so that they are fast."""

import os
import subprocess
import sys

import pytest

from attncheck.cli import attncheck

DECODE_CAUSAL = {f"decode-causal-{name}" for name in ("even", "lengths", "tall", "wide")}
HEAVY = {"torch", "triton", "numpy", "rich", "mpmath", "hypothesis", "jinja2", "attncheck.verify"}
PROGRAM = """
import sys
from attncheck.cli import main

heavy = set(sys.argv[1].split())
for verb in sys.argv[2:]:
    sys.argv = ["attncheck", *verb.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        print(verb, end.code, *sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def test_help_imports_nothing_heavy(tmp_path):
    verbs = ["", *attncheck.commands, "baseline write", "baseline diff", "baseline accept"]
    words = [sys.executable, "-c", PROGRAM, " ".join(HEAVY), *verbs]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert run.stderr.splitlines() == [f"{verb} 0" for verb in verbs]
    assert run.stdout.count("Usage: attncheck") == len(verbs)


# The support table needs torch, whose dispatcher knows which calls PyTorch's kernels take.
@pytest.mark.parametrize(
    ("options", "absent"), [((), HEAVY), (("--support", "--device", "cpu"), {"attncheck.verify"})]
)
def test_list_imports_nothing_heavy_without_need(tmp_path, options, absent):
    program = """
import sys
from attncheck.cli import attncheck

attncheck(sys.argv[1:], standalone_mode=False)
print(*sys.modules)
"""
    words = [sys.executable, "-c", program, "list", *options]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not absent & set(run.stdout.splitlines()[-1].split())
    assert ("what supports what on cpu" in run.stdout) is bool(options)


def test_gradients_do_not_import_symbolic_shapes():
    program = """
import sys
from torch.nn.functional import scaled_dot_product_attention
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.verify.run_case import run_case

problem = Problem(query=8, kv=8, heads=1, head_dim=8, dtype="fp32", backward=True)
problem = problem.replace(mask=Spec.of("causal"))
kernel = make_subject(scaled_dot_product_attention, "f")
print(run_case(kernel, Case(problem=problem), device="cpu").status)
print("torch.fx.experimental.symbolic_shapes" in sys.modules)
"""
    words = [sys.executable, "-c", program]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["pass", "False"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_for_each_shell(run_fresh, tmp_path, shell):
    run = run_fresh("completion", shell, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "_ATTNCHECK_COMPLETE" in run.stdout


COMPLETION_PROGRAM = """
import os, sys
from attncheck.cli import main

try:
    main()
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("che", {"check"}),
        ("check ide", {"ideal"}),
        ("check my", {"my_kernel.py::"}),
        ("check x --dtype b", {"bf16"}),
        ("check x --convention fl", {"flash_attn", "flex"}),
        ("check x --question decode-causal-", DECODE_CAUSAL),
        ("rmse --kernel ide", {"ideal"}),
        ("rmse --variant caus", {"causal"}),
        ("check x --format j", {"json"}),
        ("check x --las", {"--last-failed"}),
    ],
)
def test_completion_imports_nothing_heavy(tmp_path, words, completions):
    (tmp_path / "my_kernel.py").write_text("")
    command = f"attncheck {words}"
    variables = {"_ATTNCHECK_COMPLETE": "bash_complete", "COMP_WORDS": command}
    variables["COMP_CWORD"] = str(len(command.split()) - 1)
    program = [sys.executable, "-c", COMPLETION_PROGRAM]
    environment = os.environ | variables
    run = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert {line.partition(",")[2] for line in run.stdout.splitlines()} == completions
    assert not HEAVY & set(run.stderr.split())


def test_completion_lists_match_the_implementation():
    from attncheck.cases.check_cases import check_cases
    from attncheck.cli.completion import _CONVENTIONS, _FORMATS, _questions
    from attncheck.reporting.rendering import FORMATS
    from attncheck.subjects.conventions.declarations import CONVENTIONS

    assert {*_CONVENTIONS} == {*CONVENTIONS}
    assert {*_questions()} <= {question.name for question in check_cases("bf16")}
    assert _FORMATS == FORMATS

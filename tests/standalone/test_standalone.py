"""A Case as a script that needs torch and the kernel alone."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attncheck import probes
from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.diagnose import standalone_script
from attncheck.diagnose.reproduce import run_again
from attncheck.inputs.problem import Case, Problem
from attncheck.relations import relation_named
from attncheck.subjects.load import load_subject
from attncheck.verify.relation_runs import relation_inputs

KERNELS = Path(__file__).parents[1] / "cases" / "planted_kernels.py"
CAUSAL = Spec.of("causal")
SIZES = {"heads": 2, "query": 5, "kv": 6, "head_dim": 8}
# Runs scripts where attncheck cannot be imported; ends with their exit codes.
WITHOUT = """
import runpy, sys
sys.modules["attncheck"] = None
codes = []
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        codes.append(end.code)
print(codes)
"""


def case(question="compare", **changes):
    problem = Problem(**(SIZES | {"mask": CAUSAL} | changes))
    if question in probes.PROBES:
        return probes.case(question, problem)
    numbers = {}
    if question != "compare":
        numbers = {k: v[0] for k, v in relation_named(question).allowed(problem).items()}
    return Case(problem=problem, question=question, parameters=numbers)


@pytest.fixture
def script(tmp_path):
    """Writes the script of a kernel's answer; gives its Record and path."""

    def write(kernel, asked, name="script.py"):
        subject = load_subject(kernel)
        record = run_again(subject, asked, device="cpu")
        path = tmp_path / name
        text = standalone_script.render_script(
            subject,
            asked,
            record,
            kernel=kernel,
            convention="",
            device="cpu",
            facts={"problem": str(asked.problem)},
            path=path,
        )
        path.write_text(text)
        return record, path

    return write


@pytest.fixture
def imported(monkeypatch):
    """The module that a script is."""

    def load_script(path):
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, path.stem, module)  # torch's tracer looks it up
        exec(compile(path.read_text(), str(path), "exec"), vars(module))  # noqa: S102  # ours
        return module

    return load_script


@pytest.fixture
def run(imported, capsys):
    """Runs a script in this process, where attncheck is: its exit code and what it says."""

    def execute(path):
        before = torch.get_float32_matmul_precision()
        module = imported(path)
        code = module.main(module.ASKED, vars(module))
        torch.set_float32_matmul_precision(before)
        return code, capsys.readouterr().out

    return execute


def test_it_runs_where_attncheck_is_not(script, tmp_path):
    right, passes = script(f"{KERNELS}::unfused", case(), "passes.py")
    wrong, fails = script(f"{KERNELS}::no_scale", case(), "fails.py")
    assert (right.status, wrong.status) == ("pass", "fail")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(passes), str(fails)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    said, failed = done.stdout.split("FAIL compare\n")
    assert said.startswith(f"PASS compare\n  problem    {case().problem}\n")
    assert failed.endswith("[0, 1]\n")
    found = wrong.judgement
    at = found.worst.at
    assert failed.splitlines()[1:6] == [
        f"  worst      out{[at.batch, at.head, at.query, at.dim]}",
        f"  got        {found.worst.got:.9g}",
        f"  should be  {found.worst.exact:.9g}",
        f"  allowed    {found.worst.allowance:.2e}",
        f"  wrong      {found.wrong} of {found.compared} elements",
    ]


RIGHT = {
    "sdpa by name": ("sdpa-math", case(heads=4, kv_heads=2)),
    "a mask": ("sdpa-math", case(mask=Spec.of("sliding_window", window=2), dtype="fp32")),
    "another scale": (f"{KERNELS}::unfused", case(scale=0.3)),
    "empty rows": ("flex", case(query=6, kv=3, mask=Spec.of("causal_bottom_right"))),
    "flex and a score mod": ("flex", case(score=Spec.of("softcap", cap=2.0))),
    "of a module": ("torch.nn.functional:scaled_dot_product_attention", case()),
    "a probe": (f"{KERNELS}::unfused", case("decode")),
    "fp8 of our own": ("ideal", case(dtype="e4m3")),
    "a softmax of our own": (
        "torch-softmax",
        Case(problem=Problem(operation="softmax", query=3, kv=7, dtype="fp32")),
    ),
    "a relation": (f"{KERNELS}::unfused", case("future_keys")),
    "strides": (f"{KERNELS}::unfused", case("strides_transposed")),
    "runs of two problems": (f"{KERNELS}::unfused", case("pad_value_dim")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_is_within(script, run, name):
    record, path = script(*RIGHT[name])
    assert record.status == "pass"
    code, said = run(path)
    assert (code, said.split()[0]) == (0, "PASS"), said


WRONG = {
    "a fault in the mask": (f"{KERNELS}::bottom_right", case(), "wrong      "),
    "a probe": (f"{KERNELS}::bottom_right", case("decode"), "wrong      "),
    "NaN that leaks": (f"{KERNELS}::unfused", case("future_keys_nan"), "relation   broken at out"),
    "a kernel that raises": (f"{KERNELS}::raises", case(mask=Spec.of("full")), "RuntimeError: pl"),
    "another shape": (f"{KERNELS}::first_head", case(mask=Spec.of("full")), "out.shape=(1, 1,"),
    "another dtype": (f"{KERNELS}::in_fp32", case(mask=Spec.of("full")), "out.dtype=torch.float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_not(script, run, name):
    kernel, asked, says = WRONG[name]
    record, path = script(kernel, asked)
    assert record.status == ("warn" if "NaN" in name else "error" if "raises" in name else "fail")
    code, said = run(path)
    assert (code, said.split()[0]) == (1, "FAIL")
    assert says in said


def test_a_relation_shows_the_element_that_is_wrong(script, run):
    record, path = script(f"{KERNELS}::bottom_right", case("future_keys"))
    worst = record.judgement.worst
    _, said = run(path)
    assert f"  got        {worst.got:.9g}\n" in said
    assert f"  should be  {worst.exact:.9g}, which is what the other runs made of it\n" in said
    assert "  allowed    0 (bit for bit)\n" in said


@pytest.mark.parametrize("question", ["strides_transposed", "strides_far"])
def test_layouts_are_those_of_the_question(script, imported, question):
    asked = case(question)
    _, path = script(f"{KERNELS}::unfused", asked)
    assert path.stat().st_size < 2**16  # of what lies between rows nothing is in it
    module = imported(path)
    for told, inputs in zip(module.ASKED["runs"], relation_inputs(asked, "cpu"), strict=True):
        for name, tensor in inputs.tensors().items():
            its = module.tensor(module.ASKED["memory"], told["inputs"][name], "cpu")
            assert its.stride() == tensor.stride()
            assert its.storage_offset() == tensor.storage_offset()
            assert torch.equal(its, tensor)


def test_what_the_bound_cannot_show_is_said(script, run, monkeypatch):
    monkeypatch.setattr(standalone_script, "_blind_note", lambda found: "planted")
    _, path = script(f"{KERNELS}::unfused", case())
    assert "  note       planted\n" in run(path)[1]


def test_a_score_mod_that_has_no_words_is_a_line(script):
    score = Spec.of("softcap", cap=2.0)
    with pytest.raises(UsageError, match="no script can be written of bf16 causal softcap"):
        script("sdpa-math", case(score=score))


def test_tensors_that_are_too_large_are_a_line(script, monkeypatch):
    monkeypatch.setattr(standalone_script, "LARGEST", 2**10)
    with pytest.raises(UsageError, match="the script would hold 0 MiB of tensors: it may hold 0"):
        script("sdpa-math", case())

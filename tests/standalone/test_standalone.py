"""Standalone scripts, which reproduce a Case with torch and the kernel but without attncheck."""

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
# Runs scripts in a process that cannot import attncheck, and prints their exit codes.
RUN_WITHOUT_ATTNCHECK = """
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
    parameters = {}
    if question != "compare":
        parameters = {k: v[0] for k, v in relation_named(question).allowed(problem).items()}
    return Case(problem=problem, question=question, parameters=parameters)


@pytest.fixture
def write_script(tmp_path):
    """``write_script(kernel, case)`` runs the Case; returns its Record and the script's path."""

    def write(kernel, case, name="script.py"):
        subject = load_subject(kernel)
        record = run_again(subject, case, device="cpu")
        path = tmp_path / name
        text = standalone_script.render_script(
            subject,
            case,
            record,
            kernel=kernel,
            convention="",
            device="cpu",
            facts={"problem": str(case.problem)},
            path=path,
        )
        path.write_text(text)
        return record, path

    return write


@pytest.fixture
def import_script(monkeypatch):
    """``import_script(path)`` runs a script as a module, and returns it."""

    def load_script(path):
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, path.stem, module)  # torch's tracer looks it up
        exec(compile(path.read_text(), str(path), "exec"), vars(module))  # noqa: S102  # ours
        return module

    return load_script


@pytest.fixture
def run_script(import_script, capsys):
    """``run_script(path)`` runs a script in this process; returns its exit code and output."""

    def execute(path):
        before = torch.get_float32_matmul_precision()
        module = import_script(path)
        code = module.main(module.ASKED, vars(module))
        torch.set_float32_matmul_precision(before)
        return code, capsys.readouterr().out

    return execute


def test_scripts_run_without_attncheck(write_script, tmp_path):
    right, passes = write_script(f"{KERNELS}::unfused", case(), "passes.py")
    wrong, fails = write_script(f"{KERNELS}::no_scale", case(), "fails.py")
    assert (right.status, wrong.status) == ("pass", "fail")
    done = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_ATTNCHECK, str(passes), str(fails)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    passed, failed = done.stdout.split("FAIL compare\n")
    assert passed.startswith(f"PASS compare\n  problem    {case().problem}\n")
    assert failed.endswith("[0, 1]\n")
    judgement = wrong.judgement
    at = judgement.worst.at
    assert failed.splitlines()[1:6] == [
        f"  worst      out{[at.batch, at.head, at.query, at.dim]}",
        f"  got        {judgement.worst.got:.9g}",
        f"  should be  {judgement.worst.exact:.9g}",
        f"  allowed    {judgement.worst.allowance:.2e}",
        f"  wrong      {judgement.wrong} of {judgement.compared} elements",
    ]


RIGHT = {
    "sdpa by name": ("sdpa-math", case(heads=4, kv_heads=2)),
    "a mask": ("sdpa-math", case(mask=Spec.of("sliding_window", window=2), dtype="fp32")),
    "another scale": (f"{KERNELS}::unfused", case(scale=0.3)),
    "empty rows": ("flex", case(query=6, kv=3, mask=Spec.of("causal_bottom_right"))),
    "flex and a score mod": ("flex", case(score=Spec.of("softcap", cap=2.0))),
    "a function of a module": ("torch.nn.functional:scaled_dot_product_attention", case()),
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
def test_script_passes_right_kernel(write_script, run_script, name):
    record, path = write_script(*RIGHT[name])
    assert record.status == "pass"
    code, output = run_script(path)
    assert (code, output.split()[0]) == (0, "PASS"), output


WRONG = {
    "a fault in the mask": (f"{KERNELS}::bottom_right", case(), "wrong      "),
    "a probe": (f"{KERNELS}::bottom_right", case("decode"), "wrong      "),
    "NaN that leaks": (f"{KERNELS}::unfused", case("future_keys_nan"), "relation   broken at out"),
    "a kernel that raises": (f"{KERNELS}::raises", case(mask=Spec.of("full")), "RuntimeError: pl"),
    "another shape": (f"{KERNELS}::first_head", case(mask=Spec.of("full")), "out.shape=(1, 1,"),
    "another dtype": (f"{KERNELS}::in_fp32", case(mask=Spec.of("full")), "out.dtype=torch.float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_script_fails_wrong_kernel(write_script, run_script, name):
    kernel, failing_case, message = WRONG[name]
    record, path = write_script(kernel, failing_case)
    assert record.status == ("warn" if "NaN" in name else "error" if "raises" in name else "fail")
    code, output = run_script(path)
    assert (code, output.split()[0]) == (1, "FAIL")
    assert message in output


def test_script_of_a_relation_shows_the_wrong_element(write_script, run_script):
    record, path = write_script(f"{KERNELS}::bottom_right", case("future_keys"))
    worst = record.judgement.worst
    _, output = run_script(path)
    assert f"  got        {worst.got:.9g}\n" in output
    assert f"  should be  {worst.exact:.9g}, which is what the other runs made of it\n" in output
    assert "  allowed    0 (bit for bit)\n" in output


@pytest.mark.parametrize("question", ["strides_transposed", "strides_far"])
def test_script_tensors_have_the_strides_of_the_question(write_script, import_script, question):
    strided = case(question)
    _, path = write_script(f"{KERNELS}::unfused", strided)
    assert path.stat().st_size < 2**16  # the memory between rows is not stored
    module = import_script(path)
    for run, inputs in zip(module.ASKED["runs"], relation_inputs(strided, "cpu"), strict=True):
        for name, tensor in inputs.tensors().items():
            rebuilt = module.tensor(module.ASKED["memory"], run["inputs"][name], "cpu")
            assert rebuilt.stride() == tensor.stride()
            assert rebuilt.storage_offset() == tensor.storage_offset()
            assert torch.equal(rebuilt, tensor)


def test_script_prints_the_blind_spot_note(write_script, run_script, monkeypatch):
    monkeypatch.setattr(standalone_script, "_blind_note", lambda found: "planted")
    _, path = write_script(f"{KERNELS}::unfused", case())
    assert "  note       planted\n" in run_script(path)[1]


def test_score_mod_that_sdpa_cannot_express_is_a_usage_error(write_script):
    score = Spec.of("softcap", cap=2.0)
    with pytest.raises(UsageError, match="no script can be written of bf16 causal softcap"):
        write_script("sdpa-math", case(score=score))


def test_too_large_tensors_are_a_usage_error(write_script, monkeypatch):
    monkeypatch.setattr(standalone_script, "LARGEST", 2**10)
    with pytest.raises(UsageError, match="the script would hold 0 MiB of tensors: it may hold 0"):
        write_script("sdpa-math", case())

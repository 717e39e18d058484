"""``attncheck rmse`` with masks and score mods of a file, softmax and fp8; ``attncheck list``."""

import json

import pytest

from attncheck.mods import mod_files

TINY = ("--shape", "1x2x8x8", "--kernel", "ideal", "--kernel", "sdpa-math")
MODS = """
import torch

table = torch.linspace(-1, 1, 8)

def even(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0

def plus(score, b, h, q_idx, kv_idx):
    return score + table[kv_idx]

def minus(score, b, h, q_idx, kv_idx):
    return table[kv_idx] - score
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "some where"
    folder.mkdir()
    (folder / "mine.py").write_text(MODS)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def attncheck(run_in_process, library_as_before):
    return run_in_process


def outcomes(out):
    """(kernel, status, variant) of each record of a JSON report."""
    return [(r["kernel"], r["status"], r["variant"]) for r in json.loads(out)["records"]]


def test_every_kernel_runs_a_mask_and_score_mod_of_a_file(folder, run_fresh):
    """It needs a new process: torch's tracer must import Triton before any kernel does."""
    mods = ("--mask", f"{folder}/mine.py::even", f"--score={folder}/mine.py::plus")
    kernels = [f"--kernel={name}" for name in ("ideal", "sdpa-math", "flex", "triton-flash2")]
    options = ("-q", "--shape", "1x2/1x8x16", "--format", "json", "--out", "out")
    run = run_fresh("rmse", *mods, *kernels, *options, cwd=folder)
    assert (run.returncode, run.stderr) == (0, "")
    name = "mine.py::even mine.py::plus"
    assert outcomes(run.stdout) == [
        (kernel, "pass", name) for kernel in ("ideal", "sdpa-math", "flex", "triton-flash2")
    ]
    for record in json.loads(run.stdout)["records"]:
        problem = record["case"]["problem"]
        assert (problem["mask"]["name"], problem["score"]["name"]) == tuple(name.split())
        # Within 10 times the ideal kernel's error: none computes another mask or score.
        assert record["out"]["rmse"] < 10 * record["out"]["ideal_rmse"]
    command = json.loads(run.stdout)["command"]
    assert command.startswith("attncheck rmse --mask mine.py::even --score=mine.py::plus --kernel=")
    for path in (folder / "out").iterdir():
        assert "some where" not in path.read_text()


def test_case_id_changes_with_captured_numbers(folder, attncheck):
    ids = []
    for table in ("torch.linspace(-1, 1, 8)", "torch.linspace(-1, 2, 8)"):
        (folder / "mine.py").write_text(MODS.replace("torch.linspace(-1, 1, 8)", table))
        mod_files._import_mod.cache_clear()  # as in a new process
        code, out, err = attncheck(
            "rmse", *TINY, "--score", "mine.py::plus", "-q", "--format", "json"
        )
        assert (code, err) == (0, "")
        ids.append({record["case_id"] for record in json.loads(out)["records"]})
    assert not ids[0] & ids[1]


def test_sdpa_supports_only_additive_score_mods(folder, attncheck):
    code, out, _ = attncheck("rmse", *TINY, "--score", "mine.py::minus", "-q", "--format", "json")
    assert code == 0
    assert [status for _, status, _ in outcomes(out)] == ["pass", "unsupported"] * 2
    reasons = {r["reason"] for r in json.loads(out)["records"] if r["reason"]}
    assert all("is more than an added number" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("arguments", "variant"),
    [
        (("--mask", "causal"), "causal"),
        (("--score", "alibi"), "full alibi"),
        (("--mask", "causal_bottom_right", "--score", "alibi"), "causal_bottom_right alibi"),
    ],
)
def test_library_mods_are_selected_by_name(folder, attncheck, arguments, variant):
    code, out, err = attncheck("rmse", *TINY, *arguments, "-q", "--format", "json")
    assert (code, err) == (0, "")
    assert {v for _, _, v in outcomes(out)} == {variant}


def test_softmax_is_measured_with_attention(folder, attncheck):
    options = ("--dtype", "fp32", "--variant", "full", "--variant", "softmax", "-q")
    code, out, _ = attncheck("rmse", *TINY, *options, "--format", "json")
    assert code == 0
    assert outcomes(out) == [
        *[("ideal", "pass", "full"), ("sdpa-math", "pass", "full")] * 2,
        ("ideal", "pass", "softmax"),
    ]
    code, out, _ = attncheck("rmse", *TINY, *options)
    assert "fp32 · B1 H1 R8 C8 · normal · seed 0" in out


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_fp8_input_rounding_dominates_the_error(folder, attncheck, dtype):
    options = ("--kernel", "ideal", "--shape", "1x2x64x32", "--dtype", dtype, "-q")
    code, out, _ = attncheck("rmse", *options, "--variant", "causal", "--format", "json")
    assert code == 0
    for record in json.loads(out)["records"]:
        assert record["status"] == "pass"
        # 4 or 3 bits of q, k and v against 8 of out, and P in the format of the inputs.
        assert record["out"]["input_rmse"] > record["out"]["ideal_rmse"]
        assert record["out"]["ideal_rmse"] > record["out"]["floor_rmse"]


@pytest.fixture(scope="module")
def catalogue(warm_python, tmp_path_factory):
    words = ("list", "--json", "--support", "--device", "cpu")
    run = warm_python.run("attncheck", *words, cwd=tmp_path_factory.mktemp("list"))
    assert (run.returncode, run.stderr) == (0, "")
    return json.loads(run.stdout)


def test_list_names_softmax_and_fp8(catalogue):
    assert "softmax" in catalogue["variants"]
    assert list(catalogue["dtypes"]) == ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"]
    for name, summary in catalogue["dtypes"].items():
        assert ("a descale per batch and key head" in summary) is (name in {"e4m3", "e5m2"})


def test_list_has_no_support_table_by_default(catalogue, attncheck):
    code, out, err = attncheck("list", "--json")
    assert (code, err) == (0, "")
    # The device is a part of the support table.
    assert json.loads(out) == {k: v for k, v in catalogue.items() if k not in {"device", "support"}}


def test_list_shows_support_of_softmax_and_fp8(catalogue):
    ideal = catalogue["support"]["ideal"]
    assert ideal["bf16"]["softmax rows"] is True
    for dtype in ("tf32", "e4m3", "e5m2"):
        assert "softmax rows" not in ideal[dtype]
    assert ideal["e4m3"]["causal GQA"] is True
    sdpa = catalogue["support"]["sdpa-math"]
    assert "softmax rows" not in sdpa["bf16"]  # sdpa-math is not for softmax
    assert "fp8" in sdpa["e5m2"]["full MHA"]


def test_softmax_kernels_are_listed_for_softmax_only(catalogue):
    softmax_kernels = {
        name: support
        for name, support in catalogue["support"].items()
        if "absent" not in support and all(set(c) == {"softmax rows"} for c in support.values())
    }
    assert softmax_kernels
    for support in softmax_kernels.values():
        assert set(support) <= {"fp32", "fp16", "bf16"}
    assert "triton-flash2" not in softmax_kernels

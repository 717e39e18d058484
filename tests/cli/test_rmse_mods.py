"""``attncheck rmse`` with masks and score mods of a file, and ``attncheck list``."""

import json
import subprocess
import sys

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
    there = tmp_path / "some where"
    there.mkdir()
    (there / "mine.py").write_text(MODS)
    monkeypatch.chdir(there)
    return there


@pytest.fixture
def attncheck(in_process, library_as_before):
    return in_process


def measured(out):
    """(kernel, status, variant) of each record of a JSON report."""
    return [(r["kernel"], r["status"], r["variant"]) for r in json.loads(out)["records"]]


def test_a_mask_and_a_score_mod_of_a_file_by_every_kernel_in_a_process_of_its_own(folder):
    """A process of its own: torch's tracer imports Triton before any kernel is asked."""
    mods = ("--mask", f"{folder}/mine.py::even", f"--score={folder}/mine.py::plus")
    kernels = [f"--kernel={name}" for name in ("ideal", "sdpa-math", "flex", "triton-flash2")]
    options = ("-q", "--shape", "1x2/1x8x16", "--format", "json", "--out", "out")
    run = subprocess.run(
        [sys.executable, "-m", "attncheck", "rmse", *mods, *kernels, *options],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")
    name = "mine.py::even mine.py::plus"
    assert measured(run.stdout) == [
        (kernel, "pass", name) for kernel in ("ideal", "sdpa-math", "flex", "triton-flash2")
    ]
    for record in json.loads(run.stdout)["records"]:
        problem = record["case"]["problem"]
        assert (problem["mask"]["name"], problem["score"]["name"]) == tuple(name.split())
        # Each within an order of the ideal kernel: none computes another mask or score.
        assert record["out"]["rmse"] < 10 * record["out"]["ideal_rmse"]
    command = json.loads(run.stdout)["command"]
    assert command.startswith("attncheck rmse --mask mine.py::even --score=mine.py::plus --kernel=")
    for path in (folder / "out").iterdir():
        assert "some where" not in path.read_text()


def test_the_id_of_a_cell_changes_with_the_captured_numbers(folder, attncheck):
    ids = []
    for table in ("torch.linspace(-1, 1, 8)", "torch.linspace(-1, 2, 8)"):
        (folder / "mine.py").write_text(MODS.replace("torch.linspace(-1, 1, 8)", table))
        mod_files._import_mod.cache_clear()  # as another process
        code, out, err = attncheck(
            "rmse", *TINY, "--score", "mine.py::plus", "-q", "--format", "json"
        )
        assert (code, err) == (0, "")
        ids.append({record["case_id"] for record in json.loads(out)["records"]})
    assert not ids[0] & ids[1]


def test_what_is_more_than_an_added_number_is_unsupported_by_sdpa(folder, attncheck):
    code, out, _ = attncheck("rmse", *TINY, "--score", "mine.py::minus", "-q", "--format", "json")
    assert code == 0
    assert [status for _, status, _ in measured(out)] == ["pass", "unsupported"] * 2
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
def test_mods_of_the_library_by_name(folder, attncheck, arguments, variant):
    code, out, err = attncheck("rmse", *TINY, *arguments, "-q", "--format", "json")
    assert (code, err) == (0, "")
    assert {v for _, _, v in measured(out)} == {variant}


def test_softmax_is_measured_beside_attention(folder, attncheck):
    options = ("--dtype", "fp32", "--variant", "full", "--variant", "softmax", "-q")
    code, out, _ = attncheck("rmse", *TINY, *options, "--format", "json")
    assert code == 0
    assert measured(out) == [
        *[("ideal", "pass", "full"), ("sdpa-math", "pass", "full")] * 2,
        ("ideal", "pass", "softmax"),
    ]
    code, out, _ = attncheck("rmse", *TINY, *options)
    assert "fp32 · B1 H1 R8 C8 · normal · seed 0" in out


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_fp8_is_measured_and_its_inputs_cost_the_most(folder, attncheck, dtype):
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


def test_the_list_names_softmax_and_fp8(catalogue):
    assert "softmax" in catalogue["variants"]
    assert list(catalogue["dtypes"]) == ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"]
    for name, summary in catalogue["dtypes"].items():
        assert ("a descale per batch and key head" in summary) is (name in {"e4m3", "e5m2"})


def test_the_list_has_no_table_of_support_unless_asked(catalogue, attncheck):
    code, out, err = attncheck("list", "--json")
    assert (code, err) == (0, "")
    # A device is what the table is about.
    assert json.loads(out) == {k: v for k, v in catalogue.items() if k not in {"device", "support"}}


def test_the_list_says_who_takes_softmax_and_fp8(catalogue):
    ideal = catalogue["support"]["ideal"]
    assert ideal["bf16"]["softmax rows"] is True
    for dtype in ("tf32", "e4m3", "e5m2"):
        assert "softmax rows" not in ideal[dtype]
    assert ideal["e4m3"]["causal GQA"] is True
    sdpa = catalogue["support"]["sdpa-math"]
    assert "softmax rows" not in sdpa["bf16"]  # it is not asked
    assert "fp8" in sdpa["e5m2"]["full MHA"]


def test_a_kernel_for_softmax_alone_is_asked_nothing_else(catalogue):
    alone = {
        name: taken
        for name, taken in catalogue["support"].items()
        if "absent" not in taken and all(set(c) == {"softmax rows"} for c in taken.values())
    }
    assert alone
    for taken in alone.values():
        assert set(taken) <= {"fp32", "fp16", "bf16"}
    assert "triton-flash2" not in alone

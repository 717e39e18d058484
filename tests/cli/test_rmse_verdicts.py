"""``attncheck rmse``: exit codes by verdict, and ``--explain`` of one cell."""

import json

import pytest

KERNELS = """
from attncheck.subjects.ideal import Ideal

class Wrong(Ideal):
    name, summary = "wrong", "right, but for one row"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def wrong():
            outputs = call()
            outputs.out[..., -1, :] *= 1.05
            return outputs

        return wrong

class Nothing(Ideal):
    name, summary = "nothing", "declares no arithmetic"

    def arithmetic(self, problem, device):
        return None
"""
OPTIONS = ("--variant", "causal", "--shape", "1x2/2x24x8", "--dtype", "fp16", "-q")


@pytest.fixture
def attncheck(tmp_path, monkeypatch, run_in_process):
    (tmp_path / "mine.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_in_process("rmse", *OPTIONS, *words)


def test_correct_kernel_passes(attncheck):
    code, out, err = attncheck("--kernel", "ideal")
    assert (code, err) == (0, "")
    assert "1 cell: 1 pass.\n" in out
    assert "judged as fp16: " in out
    assert "would have shown: " in out


def test_wrong_kernel_exits_1(attncheck, tmp_path):
    code, out, err = attncheck("--kernel", "mine.py::Wrong", "--kernel", "ideal")
    assert (code, err) == (1, "")
    assert "fail ¹" in out
    assert "¹ fail: bound: out[0, " in out
    assert "2 cells: 1 pass, 1 fail.\n" in out
    records = json.loads((tmp_path / "reports" / "rmse.json").read_text())["records"]
    assert [r["status"] for r in records] == ["fail", "pass"]
    assert records[0]["judgement"]["worst"]["at"]["query"] == 23


def test_malformed_arithmetic_fails_its_cell(attncheck):
    code, out, err = attncheck("--kernel", "mine.py::Nothing", "--kernel", "ideal")
    assert (code, err) == (1, "")
    assert "arithmetic() returned NoneType, but should return Arithmetic." in out
    assert "2 cells: 1 pass, 1 fail.\n" in out


def test_explain_prints_one_cell_and_writes_nothing(attncheck, tmp_path):
    code, out, err = attncheck("--kernel", "ideal", "--explain", "ideal/causal")
    assert (code, err) == (0, "")
    assert out.startswith("ideal · causal · MHA 2 · fp16 · B1 Q24 K24 D8 · normal · seed 0\n")
    for words in ("\npass\n", "the largest error ÷ bound: ", "what is allowed there, "):
        assert words in out
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == ["mine.py"]


PLAIN = "from torch.nn.functional import scaled_dot_product_attention as plain"


def test_explain_accepts_the_kernel_as_typed(attncheck, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "mine.py").write_text(KERNELS)
    name = "in/mine.py::Wrong"
    # Also where the cell spells the file in another way.
    for cell in (f"{name}/causal", f"./{name}/causal", f"{tmp_path}/{name}/causal"):
        code, out, _ = attncheck("--kernel", "ideal", "--kernel", name, "--explain", cell)
        assert code == 1
        assert out.startswith("wrong · causal · MHA 2 · fp16 ")


def test_explain_rejects_unknown_cell_before_probing(attncheck, tmp_path, monkeypatch):
    from attncheck.verify import claims

    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.setattr(claims, "hold_to_claims", None)
    code, _, err = attncheck("--kernel", "plain.py::plain", "--explain", "plain/causal")
    assert code == 2
    assert err == (
        "attncheck: cell 'plain/causal' is not known: choose from "
        "plain.py::plain/causal/MHA/fp16.\n"
    )


def test_explain_of_a_failure_exits_1(attncheck):
    code, out, _ = attncheck("--kernel", "mine.py::Wrong", "--explain", "wrong/causal/MHA/fp16")
    assert code == 1
    assert out.splitlines()[1].startswith("fail: bound: out[0, ")


def test_explain_of_an_unsupported_cell_exits_5(attncheck):
    code, out, _ = attncheck(
        "--kernel", "sdpa-math", "--variant", "softcap", "--explain", "sdpa-math/softcap"
    )
    assert code == 5
    assert "unsupported: SDPA takes no score mod" in out

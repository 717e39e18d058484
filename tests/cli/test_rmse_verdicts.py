"""``attncheck rmse``: exit codes by verdict, and ``--explain``."""

import json

import pytest

WRONG = """
from attncheck.subjects.ideal import Ideal

class Wrong(Ideal):
    name, summary = "wrong", "right, but for one row"

    def prepare(self, inputs):
        call = super().prepare(inputs)

        def spoiled():
            given = call()
            given.out[..., -1, :] *= 1.05
            return given

        return spoiled

class Nothing(Ideal):
    name, summary = "nothing", "declares no arithmetic"

    def arithmetic(self, problem, device):
        return None
"""
ASKED = ("--variant", "causal", "--shape", "1x2/2x24x8", "--dtype", "fp16", "-q")


@pytest.fixture
def attncheck(tmp_path, monkeypatch, in_process):
    (tmp_path / "mine.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    return lambda *words: in_process("rmse", *ASKED, *words)


def test_a_kernel_that_is_right_passes(attncheck):
    code, out, err = attncheck("--kernel", "ideal")
    assert (code, err) == (0, "")
    assert "1 cell: 1 pass.\n" in out
    assert "judged as fp16: " in out
    assert "would have shown: " in out


def test_a_kernel_that_is_wrong_fails_with_exit_code_1(attncheck, tmp_path):
    code, out, err = attncheck("--kernel", "mine.py::Wrong", "--kernel", "ideal")
    assert (code, err) == (1, "")
    assert "fail ¹" in out
    assert "¹ fail: bound: out[0, " in out
    assert "2 cells: 1 pass, 1 fail.\n" in out
    records = json.loads((tmp_path / "reports" / "rmse.json").read_text())["records"]
    assert [r["status"] for r in records] == ["fail", "pass"]
    assert records[0]["judgement"]["worst"]["at"]["query"] == 23


def test_a_malformed_arithmetic_fails_its_cell(attncheck):
    code, out, err = attncheck("--kernel", "mine.py::Nothing", "--kernel", "ideal")
    assert (code, err) == (1, "")
    assert "arithmetic() returned NoneType, but should return Arithmetic." in out
    assert "2 cells: 1 pass, 1 fail.\n" in out


def test_one_cell_is_explained_and_nothing_is_written(attncheck, tmp_path):
    code, out, err = attncheck("--kernel", "ideal", "--explain", "ideal/causal")
    assert (code, err) == (0, "")
    assert out.startswith("ideal · causal · MHA 2 · fp16 · B1 Q24 K24 D8 · normal · seed 0\n")
    for words in ("\npass\n", "the largest error ÷ bound: ", "what is allowed there, "):
        assert words in out
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == ["mine.py"]


PLAIN = "from torch.nn.functional import scaled_dot_product_attention as plain"


def test_a_kernel_is_called_as_it_was_typed(attncheck, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "mine.py").write_text(WRONG)
    name = "in/mine.py::Wrong"
    # Also where the cell spells the file in another way.
    for cell in (f"{name}/causal", f"./{name}/causal", f"{tmp_path}/{name}/causal"):
        code, out, _ = attncheck("--kernel", "ideal", "--kernel", name, "--explain", cell)
        assert code == 1
        assert out.startswith("wrong · causal · MHA 2 · fp16 ")


def test_an_unknown_cell_is_refused_before_the_trials(attncheck, tmp_path, monkeypatch):
    from attncheck.verify import claims

    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.setattr(claims, "hold_to_claims", None)
    code, _, err = attncheck("--kernel", "plain.py::plain", "--explain", "plain/causal")
    assert code == 2
    assert err == (
        "attncheck: cell 'plain/causal' is not known: choose from "
        "plain.py::plain/causal/MHA/fp16.\n"
    )


def test_an_explained_fault_is_exit_code_1(attncheck):
    code, out, _ = attncheck("--kernel", "mine.py::Wrong", "--explain", "wrong/causal/MHA/fp16")
    assert code == 1
    assert out.splitlines()[1].startswith("fail: bound: out[0, ")


def test_an_explained_refusal_is_exit_code_5(attncheck):
    code, out, _ = attncheck(
        "--kernel", "sdpa-math", "--variant", "softcap", "--explain", "sdpa-math/softcap"
    )
    assert code == 5
    assert "unsupported: SDPA takes no score mod" in out

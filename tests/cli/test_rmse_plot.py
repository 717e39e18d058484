"""``attncheck rmse --plot`` and ``--from``: results are drawn, and shown again from reports."""

import json

import pytest

pytest.importorskip("matplotlib", reason="plots need the extra plot")

QUICK = ("--kernel", "ideal", "--variant", "causal", "--shape", "1x2x16x8", "-q")
SOFTCAP = ("--kernel", "sdpa-flash", "--variant", "softcap", "--shape", "1x2x16x8", "-q")


def tree(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def run(tmp_path_factory, attncheck):
    folder = tmp_path_factory.mktemp("run")
    plots = ("--plot", "plots/rmse.png", "--plot", "rmse.svg")
    return attncheck("rmse", *QUICK, *plots, cwd=folder), folder


@pytest.fixture(scope="module")
def report(run):
    return run[1] / "reports" / "rmse.json"


def test_plots_are_written_beside_the_reports(run, report):
    result, folder = run
    assert result.returncode == 0, result.stderr
    reports = [f"reports/rmse.{suffix}" for suffix in ("csv", "json", "md")]
    assert tree(folder) == ["plots/rmse.png", *reports, "rmse.svg"]
    command = json.loads(report.read_text())["command"]
    assert command == f"attncheck rmse {' '.join(QUICK)} --plot rmse.png --plot rmse.svg"


def test_from_shows_the_same_table_and_plot(attncheck, run, report, tmp_path):
    result, folder = run
    reshown = attncheck("rmse", "--from", str(report), "--plot", "again.svg", cwd=tmp_path)
    assert (reshown.returncode, reshown.stderr) == (0, "")
    assert reshown.stdout == result.stdout
    assert (tmp_path / "again.svg").read_bytes() == (folder / "rmse.svg").read_bytes()
    assert tree(tmp_path) == ["again.svg"]


def test_from_with_out_writes_the_same_files(attncheck, report, tmp_path):
    words = ("--from", str(report), "--out", "reports", "--format", "md")
    reshown = attncheck("rmse", *words, cwd=tmp_path)
    assert reshown.returncode == 0, reshown.stderr
    for name in tree(tmp_path):
        assert (tmp_path / name).read_bytes() == (report.parents[1] / name).read_bytes()
    assert reshown.stdout == report.with_suffix(".md").read_text()
    assert len(tree(tmp_path)) == 3


def test_from_exits_with_the_code_of_the_records(attncheck, report, tmp_path):
    data = json.loads(report.read_text())
    data["records"][0] |= {"status": "error", "reason": "planted", "judgement": None, "out": None}
    (tmp_path / "failed.json").write_text(json.dumps(data))
    reshown = attncheck("rmse", "--from", "failed.json", cwd=tmp_path)
    assert reshown.returncode == 1
    assert "planted" in reshown.stdout


def test_from_imports_neither_torch_nor_triton(report, run_fresh, tmp_path):
    before = "sys.modules['torch'] = sys.modules['triton'] = None"
    words = ("rmse", "--from", str(report), "--plot", "a.png")
    reshown = run_fresh(*words, cwd=tmp_path, before=before)
    assert reshown.returncode == 0, reshown.stderr


def test_only_plots_need_matplotlib(run_fresh, tmp_path):
    before = "sys.modules['matplotlib'] = None"
    result = run_fresh("rmse", *QUICK, "--plot", "a.png", cwd=tmp_path, before=before)
    assert (result.returncode, tree(tmp_path)) == (2, [])
    assert result.stderr == (
        "attncheck: a plot needs matplotlib, which is not installed: "
        "pip install 'attncheck[plot]'.\n"
    )
    assert run_fresh("rmse", *QUICK, cwd=tmp_path, before=before).returncode == 0


def test_nothing_measured_draws_no_plot(attncheck, tmp_path):
    result = attncheck("rmse", *SOFTCAP, "--plot", "a.png", cwd=tmp_path)
    assert result.returncode == 5
    assert result.stderr == "attncheck: nothing was measured: no plot is drawn.\n"
    assert tree(tmp_path) == [f"reports/rmse.{suffix}" for suffix in ("csv", "json", "md")]
    reshown = attncheck("rmse", "--from", "reports/rmse.json", "--plot", "a.png", cwd=tmp_path)
    assert reshown.returncode == 2
    assert "no cell that was measured" in reshown.stderr


def test_from_joins_parts_of_a_run(attncheck, run, report, tmp_path):
    result, _ = run
    data = json.loads(report.read_text())
    halves = (data["records"][:1], data["records"][1:])
    for name, records in zip(("a.json", "b.json"), halves, strict=True):
        (tmp_path / name).write_text(json.dumps(data | {"records": records}))
    reshown = attncheck("rmse", "--from", "a.json", "--from", "b.json", cwd=tmp_path)
    assert (reshown.returncode, reshown.stderr) == (0, "")
    assert reshown.stdout == result.stdout


def test_from_rejects_duplicate_parts(attncheck, report, tmp_path):
    words = ("--from", str(report)) * 2
    reshown = attncheck("rmse", *words, cwd=tmp_path)
    assert reshown.returncode == 2
    assert "is in two of the reports" in reshown.stderr
    assert len(reshown.stderr.splitlines()) == 1

"""``attncheck rmse --plot`` and ``--from``: what was measured, drawn and shown again."""

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


def test_a_plot_is_written_beside_the_reports(run):
    done, folder = run
    assert done.returncode == 0, done.stderr
    reports = [f"reports/rmse.{suffix}" for suffix in ("csv", "json", "md")]
    assert tree(folder) == ["plots/rmse.png", *reports, "rmse.svg"]
    command = json.loads((folder / "reports" / "rmse.json").read_text())["command"]
    assert command == f"attncheck rmse {' '.join(QUICK)} --plot rmse.png --plot rmse.svg"


def test_a_report_is_shown_again_as_it_was(attncheck, run, tmp_path):
    done, folder = run
    report = str(folder / "reports" / "rmse.json")
    again = attncheck("rmse", "--from", report, "--plot", "again.svg", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == done.stdout
    assert (tmp_path / "again.svg").read_bytes() == (folder / "rmse.svg").read_bytes()
    assert tree(tmp_path) == ["again.svg"]


def test_a_report_shown_again_is_written_where_out_says(attncheck, run, tmp_path):
    _, folder = run
    report = str(folder / "reports" / "rmse.json")
    again = attncheck("rmse", "--from", report, "--out", "reports", "--format", "md", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for name in tree(tmp_path):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert again.stdout == (folder / "reports" / "rmse.md").read_text()
    assert len(tree(tmp_path)) == 3


def test_the_exit_code_of_a_report_shown_again_is_that_of_its_run(attncheck, run, tmp_path):
    _, folder = run
    report = json.loads((folder / "reports" / "rmse.json").read_text())
    report["records"][0] |= {"status": "error", "reason": "planted", "judgement": None, "out": None}
    (tmp_path / "failed.json").write_text(json.dumps(report))
    again = attncheck("rmse", "--from", "failed.json", cwd=tmp_path)
    assert again.returncode == 1
    assert "planted" in again.stdout


def test_showing_a_report_again_imports_neither_torch_nor_triton(run, fresh, tmp_path):
    _, folder = run
    report = str(folder / "reports" / "rmse.json")
    before = "sys.modules['torch'] = sys.modules['triton'] = None"
    again = fresh("rmse", "--from", report, "--plot", "a.png", cwd=tmp_path, before=before)
    assert again.returncode == 0, again.stderr


def test_without_matplotlib_a_plot_is_refused_and_everything_else_runs(fresh, tmp_path):
    before = "sys.modules['matplotlib'] = None"
    done = fresh("rmse", *QUICK, "--plot", "a.png", cwd=tmp_path, before=before)
    assert (done.returncode, tree(tmp_path)) == (2, [])
    assert done.stderr == (
        "attncheck: a plot needs matplotlib, which is not installed: "
        "pip install 'attncheck[plot]'.\n"
    )
    assert fresh("rmse", *QUICK, cwd=tmp_path, before=before).returncode == 0


def test_where_nothing_was_measured_no_plot_is_drawn(attncheck, tmp_path):
    done = attncheck("rmse", *SOFTCAP, "--plot", "a.png", cwd=tmp_path)
    assert done.returncode == 5
    assert done.stderr == "attncheck: nothing was measured: no plot is drawn.\n"
    assert tree(tmp_path) == [f"reports/rmse.{suffix}" for suffix in ("csv", "json", "md")]
    again = attncheck("rmse", "--from", "reports/rmse.json", "--plot", "a.png", cwd=tmp_path)
    assert again.returncode == 2
    assert "no cell that was measured" in again.stderr


def test_parts_of_a_run_are_shown_as_one(attncheck, run, tmp_path):
    done, folder = run
    whole = folder / "reports" / "rmse.json"
    report = json.loads(whole.read_text())
    halves = (report["records"][:1], report["records"][1:])
    for name, records in zip(("a.json", "b.json"), halves, strict=True):
        (tmp_path / name).write_text(json.dumps(report | {"records": records}))
    again = attncheck("rmse", "--from", "a.json", "--from", "b.json", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == done.stdout


def test_a_part_that_is_given_twice_is_refused(attncheck, run, tmp_path):
    _, folder = run
    report = str(folder / "reports" / "rmse.json")
    again = attncheck("rmse", "--from", report, "--from", report, cwd=tmp_path)
    assert again.returncode == 2
    assert "is in two of the reports" in again.stderr
    assert len(again.stderr.splitlines()) == 1

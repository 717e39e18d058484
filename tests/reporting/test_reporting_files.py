"""Measurement reports as files: JSON that round-trips, refusals, and atomic writing."""

import errno
import json
import math
import os

import pytest

from attncheck.core import files
from attncheck.core.errors import UsageError
from attncheck.records.json_reports import LARGEST_REPORT, load_report
from attncheck.records.record import Report
from attncheck.reporting import rendering
from attncheck.reporting.rendering import check_writable, render, write_report


def load(source):
    return load_report(source, Report)


def write(report, directory):
    return write_report(report, directory, "rmse")


def assert_one_line(excinfo):
    text = str(excinfo.value)
    assert "\n" not in text
    assert len(text) < 500


def tree(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_json_round_trips_for_every_format(sample):
    text = render(sample, "json")
    loaded = load(text)
    assert render(loaded, "json") == text
    for fmt in ("table", "md", "csv"):
        assert render(loaded, fmt) == render(sample, fmt)


def test_json_round_trip_is_exact(make):
    numbers = {"rmse": 0.1 + 0.2, "bias": -1 / 3, "ideal_rmse": 5e-324, "max_error": 1.7e308}
    report = make.report(
        make.record("é \x1b[31m <b> |\n", out=make.out(**numbers), seconds=0.0),
        make.refused("k", "error", "nan"),
        make.record(out=None, lse=None, case=make.case(seed=2**63 - 1)),
        absent={"inf": "-inf"},
    )
    assert load(render(report, "json")) == report


def test_nan_and_infinities_round_trip_as_valid_json(make):
    out = make.out(rmse=math.nan, max_error=math.inf, bias=-math.inf)
    text = render(make.report(make.record(out=out, seconds=math.inf)), "json")
    json.loads(text, parse_constant=pytest.fail)
    record = load(text).records[0]
    assert math.isnan(record.out.rmse)
    assert (record.out.max_error, record.out.bias) == (math.inf, -math.inf)
    assert record.seconds == math.inf


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema=1), "schema is 1, this version reads 3"),
        (lambda d: d.update(schema=True), "schema is True"),
        (lambda d: d.pop("schema"), "schema is None"),
        (lambda d: d.update(extra=1), "unknown field `extra`"),
        (lambda d: d.update({"two\nlines": 1}), "two"),
        (lambda d: d.pop("command"), "missing required field `command`"),
        (lambda d: d["records"][0].update(status="fine"), "Invalid enum value"),
        (lambda d: d["records"][0].update(verdict="ok"), "unknown field `verdict`"),
        (lambda d: d["records"][0]["out"].update(rmse="0.1"), "Expected `float`, got `str`"),
        (
            lambda d: d["records"][0]["out"].pop("input_rmse"),
            "missing required field `input_rmse`",
        ),
        (lambda d: d["records"][0]["out"].update(rmse=None), "Expected `float`, got `null`"),
        (lambda d: d["records"][0]["out"].update(elements="nan"), "Expected `int`"),
        (lambda d: d["records"][0].update(environment="x"), "no environment 'x'"),
        (lambda d: d["records"][0].update(case={}), "holds no problem"),
        (lambda d: d["records"][0]["case"]["problem"].pop("seed"), "holds no problem"),
        (lambda d: d.update(records={}), "Expected `array`"),
        (lambda d: d.update(records=[1]), "Expected `object`"),
    ],
)
def test_load_rejects_invalid_fields(change, words, sample):
    data = json.loads(render(sample, "json"))
    change(data)
    with pytest.raises(UsageError) as excinfo:
        load(json.dumps(data))
    assert words in str(excinfo.value)
    assert_one_line(excinfo)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "nul", "{", "1e999", "[" * 100_000, '{"a":' * 100_000, '"\ud800"', "\x00"],
)
def test_load_rejects_non_reports(text):
    with pytest.raises(UsageError) as excinfo:
        load(text)
    assert_one_line(excinfo)


def test_load_reads_a_file_and_names_it_in_errors(tmp_path, sample):
    path = tmp_path / "rmse.json"
    path.write_text(render(sample, "json"), encoding="utf-8")
    assert render(load(path), "json") == render(sample, "json")
    path.write_bytes(b"\xff{")
    with pytest.raises(UsageError, match=r"rmse\.json is no report"):
        load(path)
    with pytest.raises(UsageError, match=r"absent\.json cannot be read: No such file"):
        load(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_load_rejects_oversized_file(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(LARGEST_REPORT + 1)
    with pytest.raises(UsageError, match=f"larger than {LARGEST_REPORT} bytes"):
        load(path)


def test_write_creates_exactly_three_files(tmp_path, sample):
    folder = tmp_path / "new" / "reports"
    paths = write(sample, folder)
    assert tree(folder) == ["rmse.csv", "rmse.json", "rmse.md"]
    assert [p.read_bytes().decode() for p in paths] == [
        render(sample, fmt) for fmt in ("json", "md", "csv")
    ]
    assert load(paths[0]).command == sample.command


def test_written_files_have_ordinary_permissions(tmp_path, sample):
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    for path in write(sample, tmp_path / "reports"):
        assert path.stat().st_mode == ordinary.stat().st_mode


def test_failed_rendering_leaves_the_old_files(tmp_path, sample, monkeypatch):
    write(sample, tmp_path)
    old = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(report):
        raise RuntimeError("no")

    monkeypatch.setattr(rendering, "report_csv", fail)
    with pytest.raises(RuntimeError):
        write(load(tmp_path / "rmse.json"), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == old


def test_full_disk_leaves_the_old_files(tmp_path, make, sample, monkeypatch):
    write(make.report(), tmp_path)
    old = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device") as excinfo:
        write(sample, tmp_path)
    assert_one_line(excinfo)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == old


@pytest.mark.parametrize("exists", [True, False])
def test_check_writable_leaves_nothing(tmp_path, exists):
    folder = tmp_path / "a" / "b"
    if exists:
        folder.mkdir(parents=True)
    before = tree(tmp_path)
    check_writable(folder)
    assert tree(tmp_path) == before


UNWRITABLE = {
    "under a file": "file/reports",
    "file": "file",
    "dangling link": "dangling",
    "name too long": "x" * 300,
    "null character": "a\0b",
    "directory in the way": "taken",
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_unwritable_folder_is_a_one_line_error_and_writes_nothing(kind, tmp_path, sample):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "taken" / "rmse.md").mkdir(parents=True)
    folder = tmp_path / UNWRITABLE[kind]
    before = tree(tmp_path)
    for attempt in (lambda: check_writable(folder), lambda: write(sample, folder)):
        with pytest.raises(UsageError, match="reports cannot be written to") as excinfo:
            attempt()
        assert_one_line(excinfo)
        if kind != "directory in the way":
            assert tree(tmp_path) == before
    assert not [p for p in tree(tmp_path) if "/." in p or p.startswith(".")]


def test_check_writable_reports_permission_denied(tmp_path, monkeypatch):
    def denied(**_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files.tempfile, "TemporaryFile", denied)
    with pytest.raises(UsageError, match="Permission denied; choose another --out"):
        check_writable(tmp_path)

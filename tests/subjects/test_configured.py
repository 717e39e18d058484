"""Kernels named in a project's configuration file or published by an installed package."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from tests.messages import one_line

from attncheck.core.errors import UnknownName, UsageError
from attncheck.subjects.capabilities import configuration
from attncheck.subjects.capabilities.configuration import entry_from, with_table, write_file
from attncheck.subjects.capabilities.declared import Declared
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import kernel_names, load_subject

KERNEL = "def kernel(q, k, v, is_causal=False): return q\n"
MINE = '{header}\nentry = "kernels.py::kernel"\nconvention = "sdpa"\nhead_dims = [64]\n'
HEADERS = {
    "pyproject.toml": "[tool.attncheck.kernels.mine]",
    "attncheck.toml": "[kernels.mine]",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text(KERNEL)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def points(monkeypatch):
    """``points(name="module:attribute", …)``: let packages have published these entry points."""

    def publish(*pairs, **values):
        published = [
            EntryPoint(name, value, configuration.GROUP)
            for name, value in (*pairs, *values.items())
        ]
        monkeypatch.setattr(configuration.metadata, "entry_points", lambda group: published)

    return publish


@pytest.mark.parametrize("name", HEADERS)
def test_kernel_is_loaded_from_a_file_of_a_parent_folder(project, name):
    (project / name).write_text(MINE.format(header=HEADERS[name]))
    subject = load_subject("mine")
    assert isinstance(subject, Declared)
    assert subject.name == "mine"
    assert subject.capabilities.head_dims == (64,)
    assert "mine" in kernel_names()


def test_nearest_attncheck_configuration_wins_and_other_pyprojects_are_skipped(project):
    (project / "pyproject.toml").write_text(MINE.format(header=HEADERS["pyproject.toml"]))
    (project / "below" / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert load_subject("mine").name == "mine"
    (project / "below" / "attncheck.toml").write_text("[kernels]\n")
    with pytest.raises(UnknownName, match="kernel 'mine' is not known"):
        load_subject("mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.attncheck.kernels.mine]\nentry = ?\n", "is no TOML: .*line 2"),
        ("[tool.attncheck.kernel.mine]\n", "key 'kernel' is not known: did you mean 'kernels'"),
        ("[tool.attncheck]\nkernels = 3\n", "kernels must be a table"),
        ("[tool]\nattncheck = 3\n", "tool.attncheck must be a table"),
        ("[tool.attncheck.kernels]\nmine = 3\n", "kernels.mine: expected table, got whole number"),
        ("[tool.attncheck.kernels.mine]\n", "kernels.mine: .*missing required field entry"),
        ("[tool.attncheck.kernels.flex]\nentry = 'a:b'\n", "attncheck has a kernel of this name"),
        ("[tool.attncheck.kernels.'a:b']\nentry = 'a:b'\n", "a kernel's name has no ':'"),
        ("[tool.attncheck.kernels.mine]\nentry = 'kernels'\n", "neither FILE.py::NAME nor package"),
        ("[tool.attncheck.kernels.mine]\nentry = 'kernels.py::x'\n", "has no 'x'"),
        ("[tool.attncheck.kernels.mine]\nentry = 'gone.py::x'\n", "there is no file"),
        (
            "[tool.attncheck.kernels.mine]\nentry = 'kernels.py::kernel'\nconvention = 'ours'\n",
            "convention 'ours' is not known",
        ),
    ],
)
def test_invalid_configuration_is_refused_in_one_line(project, text, message):
    (project / "pyproject.toml").write_text(text)
    with one_line(UsageError, match=message):
        load_subject("mine")


def test_two_configuration_files_in_one_folder_are_refused(project):
    for name, header in HEADERS.items():
        (project / name).write_text(MINE.format(header=header))
    with pytest.raises(UsageError, match=r"attncheck.toml and pyproject.toml .* keep one"):
        load_subject("mine")


def test_unknown_kernel_lists_builtin_configured_and_published_names(project, points):
    (project / "pyproject.toml").write_text(MINE.format(header=HEADERS["pyproject.toml"]))
    points(theirs="somewhere:kernel")
    with pytest.raises(UnknownName, match=r"choose from flex, ideal, mine, .*theirs"):
        load_subject("yours")


def test_builtin_kernel_loads_beside_a_broken_configuration(project):
    (project / "pyproject.toml").write_text("[tool.attncheck")
    assert load_subject("ideal").name == "ideal"


def test_configured_kernel_with_the_name_of_a_builtin_is_refused(project):
    (project / "attncheck.toml").write_text("[kernels.ideal]\nentry = 'kernels.py::kernel'\n")
    with pytest.raises(UsageError, match="one of yours is called so too"):
        load_subject("ideal")


def test_entry_may_be_a_module_beside_the_configuration(project):
    (project / "beside_the_file.py").write_text(KERNEL)
    (project / "attncheck.toml").write_text(
        '[kernels.mine]\nentry = "beside_the_file:kernel"\nconvention = "sdpa"\n'
    )
    assert load_subject("mine").name == "mine"


def test_table_may_declare_capabilities_of_a_builtin_kernel(project):
    (project / "attncheck.toml").write_text(
        '[kernels.mine]\nentry = "ideal"\nempty_row = "zero"\nlse = true\npromises = ["repeat"]\n'
    )
    subject = load_subject("mine")
    assert subject.promises == {"repeat"}
    assert isinstance(subject.inner, Ideal)


PUBLISHED = """
from attncheck.subjects.ideal import Ideal
class Theirs(Ideal):
    name = "theirs"
subject = Theirs()
def function(q, k, v, is_causal=False): return q
table = {"entry": function, "convention": "sdpa", "head_dims": [64]}
named = {"entry": "published_kernels:function", "convention": "sdpa"}
wrong = {"entry": function, "head_dim": [64]}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "published_kernels.py").write_text(PUBLISHED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("published_kernels", None)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("value", "has_table"),
    [("subject", False), ("function", False), ("table", True), ("named [extra]", True)],
)
def test_entry_point_may_be_a_kernel_or_a_table(points, value, has_table):
    points(theirs=f"published_kernels:{value}")
    subject = load_subject("theirs")
    assert subject.name == "theirs"
    assert isinstance(subject, Declared) is has_table


@pytest.mark.usefixtures("package")
def test_invalid_entry_point_is_refused(points):
    points(theirs="published_kernels:wrong", gone="no_such_package_at_all:x")
    with pytest.raises(UsageError, match=r"entry point 'theirs' .* key 'head_dim' is not known"):
        load_subject("theirs")
    with pytest.raises(UsageError, match="importing no_such_package_at_all raised ModuleNotFound"):
        load_subject("gone")


def test_entry_points_of_two_packages_with_one_name_are_refused(points):
    points(("theirs", "one:kernel"), ("theirs", "two:kernel"))
    with pytest.raises(UsageError, match="several entry points: one:kernel and two:kernel"):
        load_subject("theirs")


def test_duplicate_entry_point_counts_once(points):
    points(("theirs", "one:kernel"), ("theirs", "one:kernel"))
    assert len(configuration.entry_points()["theirs"]) == 1


def test_entry_points_are_cached_until_a_package_is_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    searches, find = [], configuration.metadata.entry_points
    count = lambda group: searches.append(group) or find(group=group)  # noqa: E731
    monkeypatch.setattr(configuration.metadata, "entry_points", count)
    assert "mine" not in configuration.entry_points()
    configuration.entry_points()
    assert len(searches) == 1
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{configuration.GROUP}]\nmine = module:kernel\n")
    assert "mine" in configuration.entry_points()
    assert len(searches) == 2


OLD = """[tool.attncheck.kernels.mine]
entry = 'old'
[[tool.attncheck.kernels.mine.override]]
when = { dtype = 'fp16' }
"""
TABLE = "[tool.attncheck.kernels.mine]\nentry = 'new.py::kernel'\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", TABLE),
        ("# mine\r\n[project]\r\nx = 1", "# mine\r\n[project]\r\nx = 1\r\n\r\n" + TABLE),
        (OLD + "[tool.other]\n# kept\n", TABLE + "[tool.other]\n# kept\n"),
        (f"a = 1 # one\n{OLD}\n# of b\n[b]\nc = 2", f"a = 1 # one\n{TABLE}\n# of b\n[b]\nc = 2"),
        ("x = '''\n[kernels.mine]\n'''\n", "x = '''\n[kernels.mine]\n'''\n\n" + TABLE),
        (
            "[tool.attncheck.kernels.mine2]\nentry = 'a:b'\n",
            "[tool.attncheck.kernels.mine2]\nentry = 'a:b'\n\n" + TABLE,
        ),
    ],
)
def test_table_is_added_or_replaced_without_other_changes(tmp_path, before, after):
    path = tmp_path / "pyproject.toml"
    path.write_bytes(before.encode())
    path.chmod(0o640)
    write_file(path, with_table(path, "mine", TABLE))
    expected = after if "\r\n" not in before else after.replace(TABLE, TABLE.replace("\n", "\r\n"))
    assert path.read_bytes().decode() == expected
    assert path.stat().st_mode & 0o777 == 0o640
    assert [one.name for one in tmp_path.iterdir()] == ["pyproject.toml"]


def test_inline_table_is_refused_and_left_unchanged(tmp_path):
    path = tmp_path / "pyproject.toml"
    text = "tool.attncheck.kernels = { mine = { entry = 'a:b' } }\n"
    path.write_text(text)
    with pytest.raises(UsageError, match="cannot be added to: do it there"):
        with_table(path, "mine", TABLE)
    assert path.read_text() == text


def test_symbolic_link_is_written_through(tmp_path):
    (tmp_path / "real.toml").write_text("x = 1\n")
    (tmp_path / "pyproject.toml").symlink_to(tmp_path / "real.toml")
    write_file(tmp_path / "pyproject.toml", "x = 2\n")
    assert (tmp_path / "pyproject.toml").is_symlink()
    assert (tmp_path / "real.toml").read_text() == "x = 2\n"


def test_entry_of_a_file_is_relative_to_the_configuration(project):
    configuration_file = project / "pyproject.toml"
    assert entry_from("kernels.py::kernel", configuration_file) == "below/kernels.py::kernel"
    assert entry_from("package:kernel", configuration_file) == "package:kernel"


def test_help_of_probe_init_and_list_does_not_import_torch():
    code = (
        "import sys; from attncheck.cli import attncheck\n"
        "for verb in ('probe', 'init', 'list'):\n"
        "    attncheck.main([verb, '--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

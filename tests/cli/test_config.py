"""``attncheck config``: every mistake of a file that names kernels, and nothing heavy imported."""

from pathlib import Path

import pytest

from attncheck.subjects.capabilities.configuration import CONVENTION_NAMES, find_mistakes

KERNELS = "def attention(query, key, value): ...\n\ndef gradients(dout): ...\n"
RIGHT = """
[kernels.mine]
entry = "kernels.py::attention"
convention = "sdpa"
backward = "kernels.py::gradients"
sources = ["*.py"]
[[kernels.mine.override]]
when = { dtype = "bf16" }
masks = ["causal"]
[kernels.theirs]
entry = "json.decoder:JSONDecoder.decode"
[kernels.ours]
entry = "triton-flash2"
[kernels.built_in]
entry = "math:sin"
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """``written(text)``: an attncheck.toml of that text beside kernels.py."""
    monkeypatch.chdir(tmp_path)
    Path("kernels.py").write_text(KERNELS)

    def write(text):
        Path("attncheck.toml").write_text(text)
        return Path("attncheck.toml")

    return write


def test_a_right_file_has_no_mistakes(written):
    assert find_mistakes(written(RIGHT)) == (4, [])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('entry = "gone.py::attention"', "entry: there is no file gone.py."),
        ('entry = "kernels.py::gone"', "entry: kernels.py has no 'gone'."),
        ('entry = "gone.module:attention"', "entry: there is no module 'gone.module'."),
        ('entry = "json.gone:attention"', "entry: there is no module 'json.gone'."),
        ('entry = "json.decoder:gone"', "entry: json.decoder has no 'gone'."),
        ('entry = "gone"', "entry: 'gone' is neither FILE.py::NAME nor package.module:NAME."),
        ('entry = "broken.py::f"', "entry: broken.py is no Python: '(' was never closed"),
        ('backward = "kernels.py::gone"', "backward: kernels.py has no 'gone'."),
        ('convention = "gone"', "convention 'gone' is not known: choose from flash_attn, flex,"),
        ('sources = ["csrc/**"]', "sources: 'csrc/**' fits no file below "),
        ('sources = [""]', "sources: '' fits no file below "),
        ('sources = ["/abs"]', "sources: '/abs' is absolute: it must be relative"),
        ('sources = ["a/../../b"]', "sources: 'a/../../b' has '..': it must be below"),
        ('dtypes = ["bf17"]', "dtypes 'bf17' is not known: choose from bf16,"),
        ("head_dims = [0]", "head_dims=0 must be 1–256."),
        ("gone = 1", "key 'gone' is not known: choose from arithmetic,"),
        ("masks = 1", "masks: expected list, got whole number."),
    ],
)
def test_each_mistake_is_a_line(written, line, says):
    Path("broken.py").write_text("f(\n")
    entry = "" if line.startswith("entry") else 'entry = "kernels.py::attention"\n'
    count, found = find_mistakes(written(f"[kernels.mine]\n{entry}{line}\n"))
    assert count == 1
    assert len(found) == 1
    assert found[0].startswith(f"attncheck.toml: kernels.mine: {says}")
    assert "\n" not in found[0]


def test_all_mistakes_are_said_and_not_the_first_alone(written):
    _, found = find_mistakes(
        written(
            '[kernels.one]\ndtypes = ["bf17"]\nmasks = ["gone"]\n'
            '[[kernels.one.override]]\nwhen = { dtype = "bf16" }\n'
            '[[kernels.one.override]]\nwhen = { dtyp = "bf16" }\n'
            '[kernels.two]\nentry = "gone.py::f"\nconvention = "gone"\n'
        )
    )
    assert [line.split(": ")[1] for line in found] == ["kernels.one"] * 4 + ["kernels.two"] * 2
    for what in ("entry", "bf17", "'gone'", "override[1].when.dtyp", "convention", "gone.py"):
        assert any(what in line for line in found), what


def test_what_is_no_table_is_a_line(written):
    for text in ("[kernels", "kernels = 1", "gone = 1", "[kernels]\nmine = 1"):
        assert len(find_mistakes(written(text))[1]) == 1


def test_conventions_are_those_that_there_are():
    from attncheck.subjects.conventions import declarations

    assert sorted(CONVENTION_NAMES) == sorted(declarations.CONVENTIONS)


def test_nothing_of_the_project_is_imported(written):
    Path("kernels.py").write_text(f"raise RuntimeError\n{KERNELS}")
    assert find_mistakes(written(RIGHT))[1] == []


HEAVY = """
import atexit
heavy = {"torch", "triton", "numpy", "hypothesis"}
atexit.register(lambda: print("heavy:", *sorted(heavy & set(sys.modules)), file=sys.stderr))
"""


def test_the_verb_is_light_and_ends_with_2(written, tmp_path, fresh):
    written(RIGHT)
    right = fresh("config", cwd=tmp_path, before=HEAVY)
    assert (right.returncode, right.stdout) == (0, "attncheck.toml: 4 kernels\n")
    assert right.stderr == "heavy:\n"
    written('[kernels.mine]\nentry = "gone.py::f"\n[kernels.two]\n')
    wrong = fresh("config", "attncheck.toml", cwd=tmp_path, before=HEAVY)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    *lines, heavy = wrong.stderr.splitlines()
    assert (len(lines), heavy) == (2, "heavy:")
    assert all(line.startswith("attncheck: attncheck.toml: kernels.") for line in lines)


def test_the_verb_needs_a_file(tmp_path, monkeypatch, in_process):
    monkeypatch.chdir(tmp_path)
    code, _, said = in_process("config")
    assert code == 2
    assert "`attncheck init SPEC` writes a table" in said
    code, _, said = in_process("config", "gone.toml")
    assert code == 2
    assert "gone.toml cannot be read" in said
    Path("pyproject.toml").write_text('[project]\nname = "other"\n')
    assert in_process("config", "pyproject.toml") == (0, "pyproject.toml: 0 kernels\n", "")

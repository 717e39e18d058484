"""``attncheck config`` lists every mistake in a configuration file, importing nothing heavy."""

from pathlib import Path

import pytest

from attncheck.subjects.capabilities.configuration import CONVENTION_NAMES, find_mistakes

KERNELS = "def attention(query, key, value): ...\n\ndef gradients(dout): ...\n"
VALID = """
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
def write_config(tmp_path, monkeypatch):
    """``write_config(text)``: write attncheck.toml with that text beside kernels.py."""
    monkeypatch.chdir(tmp_path)
    Path("kernels.py").write_text(KERNELS)

    def write(text):
        Path("attncheck.toml").write_text(text)
        return Path("attncheck.toml")

    return write


def test_valid_file_has_no_mistakes(write_config):
    assert find_mistakes(write_config(VALID)) == (4, [])


@pytest.mark.parametrize(
    ("line", "message"),
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
def test_each_mistake_is_one_line(write_config, line, message):
    Path("broken.py").write_text("f(\n")
    entry = "" if line.startswith("entry") else 'entry = "kernels.py::attention"\n'
    count, mistakes = find_mistakes(write_config(f"[kernels.mine]\n{entry}{line}\n"))
    assert count == 1
    assert len(mistakes) == 1
    assert mistakes[0].startswith(f"attncheck.toml: kernels.mine: {message}")
    assert "\n" not in mistakes[0]


def test_all_mistakes_are_reported(write_config):
    _, mistakes = find_mistakes(
        write_config(
            '[kernels.one]\ndtypes = ["bf17"]\nmasks = ["gone"]\n'
            '[[kernels.one.override]]\nwhen = { dtype = "bf16" }\n'
            '[[kernels.one.override]]\nwhen = { dtyp = "bf16" }\n'
            '[kernels.two]\nentry = "gone.py::f"\nconvention = "gone"\n'
        )
    )
    assert [line.split(": ")[1] for line in mistakes] == ["kernels.one"] * 4 + ["kernels.two"] * 2
    for what in ("entry", "bf17", "'gone'", "override[1].when.dtyp", "convention", "gone.py"):
        assert any(what in line for line in mistakes), what


def test_malformed_tables_are_one_line(write_config):
    for text in ("[kernels", "kernels = 1", "gone = 1", "[kernels]\nmine = 1"):
        assert len(find_mistakes(write_config(text))[1]) == 1


def test_known_conventions_match_the_implemented_ones():
    from attncheck.subjects.conventions import declarations

    assert sorted(CONVENTION_NAMES) == sorted(declarations.CONVENTIONS)


def test_project_files_are_not_imported(write_config):
    Path("kernels.py").write_text(f"raise RuntimeError\n{KERNELS}")
    assert find_mistakes(write_config(VALID))[1] == []


HEAVY = """
import atexit
heavy = {"torch", "triton", "numpy", "hypothesis"}
atexit.register(lambda: print("heavy:", *sorted(heavy & set(sys.modules)), file=sys.stderr))
"""


def test_verb_imports_nothing_heavy_and_exits_2_on_mistakes(write_config, tmp_path, run_fresh):
    write_config(VALID)
    right = run_fresh("config", cwd=tmp_path, before=HEAVY)
    assert (right.returncode, right.stdout) == (0, "attncheck.toml: 4 kernels\n")
    assert right.stderr == "heavy:\n"
    write_config('[kernels.mine]\nentry = "gone.py::f"\n[kernels.two]\n')
    wrong = run_fresh("config", "attncheck.toml", cwd=tmp_path, before=HEAVY)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    *lines, heavy = wrong.stderr.splitlines()
    assert (len(lines), heavy) == (2, "heavy:")
    assert all(line.startswith("attncheck: attncheck.toml: kernels.") for line in lines)


def test_verb_requires_a_readable_file(tmp_path, monkeypatch, run_in_process):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_in_process("config")
    assert code == 2
    assert "`attncheck init SPEC` writes a table" in err
    code, _, err = run_in_process("config", "gone.toml")
    assert code == 2
    assert "gone.toml cannot be read" in err
    Path("pyproject.toml").write_text('[project]\nname = "other"\n')
    assert run_in_process("config", "pyproject.toml") == (0, "pyproject.toml: 0 kernels\n", "")

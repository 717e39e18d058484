"""Every snippet of README and docs does what it says."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    *sorted(
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "docs").rglob("*.md")
        if p.name not in {"fault-models.md", "relations.md"}  # written by docs/conf.py
    ),
)

_LARGEST_IMAGE = 300_000  # bytes


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_snippet_does_what_it_says(run_snippets, name):
    # One of them as in a user's shell: elsewhere that is the most of its time.
    run = run_snippets(ROOT / name, fresh=name == "docs/reference/reports.md")
    assert run.returncode == 0, run.stderr


def test_every_image_is_shown_and_small():
    images = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.png")}
    texts = ((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)
    shown = {i for text in texts for i in re.findall(r"\]\([./]*(images/[\w-]+\.png)\)", text)}
    assert shown == images
    assert all((ROOT / "docs" / image).stat().st_size < _LARGEST_IMAGE for image in images)


def test_only_what_is_exempt_is_not_run(reader):
    kinds = Counter((name, info) for name in DOCUMENTS for info, _ in reader.blocks(ROOT / name))
    run = {"python", "console", "console figures"}
    others = {
        key: count
        for key, count in kinds.items()
        if key[1] not in run and not re.fullmatch(r"python \w+\.py|json \w+", key[1])
    }
    assert others == reader.EXEMPT


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_snippet_hides_from_the_fences(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "```" not in outside
    assert "~~~" not in outside
    # Four spaces after an empty line make a block of code too.
    assert not re.search(r"\n\n(?: {4}|\t)", outside)


def block(info, *lines):
    return "\n".join((f"```{info}", *lines, "```", ""))


LIST = "$ attncheck --version"
FAULTS = {
    "an assertion that fails": (block("python", "assert 1 + 1 == 3, 'planted'"), "planted"),
    "an import that is gone": (block("python", "from attncheck import nothing"), "nothing"),
    "a warning": (block("python", "import warnings", "warnings.warn('planted')"), "planted"),
    "a doctest with another result": (block("python", ">>> 1 + 1", "3"), "Got:\n    2"),
    "another output": (block("console", LIST, "attncheck, version 9"), "printed:"),
    "output that is not all": (block("console", LIST, "attncheck"), "printed:"),
    "another exit code": (block("console", LIST, "...", "(exit code 1)"), "exit code 0, not 1"),
    "a failure without its exit code": (block("console", "$ attncheck nothing"), "exit code 2"),
    "figures but other words": (block("console figures", LIST, "attncheck, v. 1"), "printed:"),
    "another program": (block("console", "$ rm -r reports"), "'rm' is none of"),
    "no command": (block("console", "attncheck --version"), "begins with"),
    "JSON that no reader takes": (block("json problem", '{"queri": 4}'), "no field 'queri'"),
    "JSON with another value": (block("json problem", '{"query": 4, "kv": 0}'), "['kv']"),
    "JSON of no kind": (block("json", "{}"), "'json'"),
    "shell": (block("sh", "make"), "'sh'"),
    "a block without a kind": (block("", "anything"), "''"),
    "a file that nothing uses": (block("python my.py", "x = 1"), "my.py"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_snippet_is_found(run_snippets, tmp_path, fault):
    text, says = FAULTS[fault]
    document = tmp_path / "broken.md"
    document.write_text(f"# Broken\n\n{text}", encoding="utf-8")
    run = run_snippets(document)
    assert run.returncode == 1
    assert says in run.stderr


def test_a_sound_document_passes_and_is_counted(run_snippets, tmp_path):
    document = tmp_path / "sound.md"
    document.write_text(
        block("python", "x = 2")
        + block("python", ">>> x + 1", "3")
        + block("python my.py", "print('seven')", "raise SystemExit(4)")
        + block("console", LIST, "attncheck, ...", "$ python my.py", "seven", "(exit code 4)")
        + block("console figures", LIST, "attncheck, version 7.7.7")
        + block("json mask", '{"name": "sliding_window", "window": 8}')
    )
    run = run_snippets(document)
    assert (run.stdout, run.stderr) == ("6 snippets\n", "")


ROW = "flash2  1.29×  4.1e-07  0,1,124,36  9.48 ms†"


@pytest.mark.parametrize(
    ("shown", "same"),
    [
        ("flash2 1.0× -2.00e-05   0,0,0,0  141 µs†", True),
        ("flash3 1.0× 1 0 1 ms†", False),
        ("flash2 exact 1 0 1 ms†", False),
        ("flash2 1.0× 1 0 1 ms", False),
    ],
)
def test_figures_stand_for_numbers_and_times_only(run_snippets, tmp_path, shown, same):
    says = block("python say.py", f"print('{ROW}')")
    document = tmp_path / "figures.md"
    document.write_text(says + block("console figures", "$ python say.py", shown), encoding="utf-8")
    run = run_snippets(document)
    assert (run.returncode == 0) == same
    assert same or "printed:" in run.stderr

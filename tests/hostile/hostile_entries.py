"""Reads, runs and judges the table of hostile kernels and bad inputs, and writes its page.

Each file of ``entries/`` holds families in TOML. A family has a ``title``, sentences (``about``),
and defaults for the fields of its entries. An entry has

* ``name``: what is hostile or bad, as shown on the page;
* ``kernel``: the body of ``def kernel(q, k, v)`` in ``k.py``, after ``HEAD``; or ``file``: all of
  ``k.py``; ``files``: other files by name; ``setup``: Python to run in the folder beforehand;
* ``command``: the words after ``attncheck``; or ``line``: a shell command, where ``$A`` is
  attncheck; ``environment``: variables to set, or to unset where empty;
* ``code``: the exit code; ``says``: the line that informs the user, where … stands for any text.
  It is the first line of standard error unless a verdict was reached (codes 0, 1 and 5), and
  empty where no output can be read;
* ``fresh``: run in a Python that has imported nothing, for entries about processes or descriptors;
* ``prints``: how many lines of standard error may be the kernel's own;
* ``leaves``: files that it may leave in its folder, besides ``reports``;
* ``pending``: the reason if attncheck does not yet behave as the entry states.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.warm_python import Servers

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "hostile.md"
HEAD = """\
import os, signal, sys, threading, time
import torch
from torch.nn.functional import scaled_dot_product_attention as right

"""
_MOST_LINES = 4  # on standard error
_VERDICTS = {0, 1, 5}  # with any other exit code, standard error starts with the one line
_SECONDS = 60
# Escapes, control characters except tab and newline, and characters that reverse or hide text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One hostile kernel or bad input; the module's docstring explains the fields."""

    family: str
    name: str
    code: int
    says: str
    command: str = ""
    line: str = ""
    kernel: str = ""
    file: str = ""
    files: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    fresh: bool = False
    prints: int = 0
    leaves: tuple[str, ...] = ()
    pending: str = ""

    @property
    def id(self) -> str:
        """The test's id in pytest."""
        return f"{self.family}: {self.name}"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One table of the page."""

    title: str
    about: str
    command: str
    entries: tuple[Entry, ...]


def families(file: str = "*") -> list[Family]:
    """Every family, in the page's order; or only those of the files ``N_file.toml``."""
    return [
        _family(data)
        for path in sorted((HERE / "entries").glob(f"?_{file}.toml"))
        for data in tomllib.loads(path.read_text(encoding="utf-8"))["family"]
    ]


def _family(data: dict[str, Any]) -> Family:
    own = {each.name for each in fields(Entry)}
    shared = {name: value for name, value in data.items() if name in own}
    entries = tuple(Entry(**{"family": data["title"], **shared, **each}) for each in data["entry"])
    return Family(
        title=data["title"],
        about=data.get("about", ""),
        command=shared.get("command", ""),
        entries=entries,
    )


# ------------------------------------------------------------------ one entry


def run(entry: Entry, folder: Path, servers: Servers) -> subprocess.CompletedProcess[str]:
    """Runs the entry in ``folder/work``."""
    work = folder / "work"
    for name in ("work", "home", "tmp"):
        (folder / name).mkdir()
    text = entry.file
    if entry.kernel:
        body = "".join(f"    {line}\n" for line in entry.kernel.strip().splitlines())
        text = f"{HEAD}def kernel(q, k, v):\n{body}"
    for name, content in {**({"k.py": text} if text else {}), **entry.files}.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    if entry.setup:
        subprocess.run([sys.executable, "-I", "-c", entry.setup], cwd=work, check=True)
    env = _environment(folder, entry)
    if entry.line:
        words = ["bash", "-c", entry.line]
        env["A"] = f"{sys.executable} -m attncheck"
    else:
        words = [sys.executable, "-m", "attncheck", *shlex.split(entry.command)]
        if not entry.fresh:
            # Not in this folder, or the server would look like a leftover process.
            servers.start("attncheck", {**env, "HOME": "/", "TMPDIR": ""})
            # A kernel that patches the judge must meet it before the exact result is known.
            keeps = entry.family != "Kernels that patch the judge"
            return servers.run(*words[2:], cwd=work, env=env, timeout=_SECONDS, keeps=keeps)
    return subprocess.run(
        words,
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=_SECONDS,
    )


def _environment(folder: Path, entry: Entry) -> dict[str, str]:
    prefixes = (
        "PYTEST_",
        "TRITON_INTERPRET",
        "COLUMNS",
        "NO_COLOR",
        "FORCE_COLOR",
        "PYTHONIOENCODING",
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    settings = {
        "COLUMNS": "200",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
    }
    if entry.fresh or entry.line:
        settings["OMP_WAIT_POLICY"] = "PASSIVE"
    else:  # like other tests, to share their server
        settings["TRITON_INTERPRET"] = "1"
    merged = {**inherited, **settings, **entry.environment}
    return {name: value for name, value in merged.items() if value}


def mistakes(entry: Entry, folder: Path, done: subprocess.CompletedProcess[str]) -> list[str]:
    """Deviations from the entry, and from what holds for every command."""
    problems = []
    if done.returncode != entry.code:
        problems.append(f"exit code {done.returncode}, not {entry.code}")
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    lines = [*out, *err] if entry.code in _VERDICTS else err[entry.prints :][:1]
    if not any(_pattern(entry.says).search(line) for line in lines or [""]):
        problems.append(f"nothing says {entry.says!r}")
    if len(err) > _MOST_LINES + entry.prints:
        problems.append(f"{len(err)} lines of standard error")
    wants_colours = "FORCE_COLOR" in entry.environment
    checks = entry.command.startswith("check") and entry.code in _VERDICTS and entry.says
    verdict = (out or [""])[0].lstrip("\x1b[0123456789;m# ")
    if checks and not verdict.startswith(("PASS ", "FAIL ", "NOTHING TESTED ")):
        problems.append(f"begins without a verdict: {verdict!r}")
    if not wants_colours and (unsafe := _UNSAFE.findall(done.stdout + done.stderr)):
        problems.append(f"characters {sorted(set(unsafe))} reach the terminal")
    if re.search(r'File "[^"]*\battncheck/\w', done.stdout + done.stderr):
        problems.append("a traceback of ours")
    if leftovers := _leftover_files(entry, folder):
        problems.append(f"left {leftovers}")
    if running := _running_processes(folder):
        problems.append(f"still run: {running}")
    return problems


def _pattern(says: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, says.split("…"))))


def _leftover_files(entry: Entry, folder: Path) -> list[str]:
    """Files it must not leave: outside its folder, or inside beside its report."""
    outside = [path for name in ("home", "tmp") for path in (folder / name).rglob("*")]
    known = {"reports", "k.py", "__pycache__", *entry.files, *entry.leaves}
    known |= {name.partition("/")[0] for name in known}
    inside = [] if entry.setup else [p for p in (folder / "work").iterdir() if p.name not in known]
    return [
        str(path.relative_to(folder))
        for path in (*outside, *inside)
        if path.is_file() and ".cache/" not in str(path)
    ]


def _running_processes(folder: Path) -> list[str]:
    """Processes whose working directory is in ``folder``, or that have it in their environment."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            folder_of_process = (process / "cwd").readlink()
            in_environment = str(folder).encode() in (process / "environ").read_bytes()
            if in_environment or folder_of_process.is_relative_to(folder):
                processes.append((process / "cmdline").read_text().replace("\0", " ")[:100])
        except OSError:  # it has ended, or belongs to another user
            continue
    return processes


# ------------------------------------------------------------------ the page


def page() -> str:
    """The text of ``docs/reference/hostile.md``."""
    all_families = families()
    count = sum(len(family.entries) for family in all_families)
    lines = [
        "# Hostile kernels and bad inputs",
        "",
        f"What attncheck says of {count} kernels that break, cheat or scribble, and of files,",
        "options and environments that are wrong. The tests run every line of these tables: the",
        "exit code, the line that tells the user (… stands for anything), at most a few lines on",
        "standard error, no traceback of attncheck's, no escape code that reaches the terminal, no",
        "file left elsewhere, no process left behind. Kernels are `kernel` of a file `k.py`; where",
        "a row shows no command, it is the one above its table.",
        "",
        "Exit codes: 0 pass, 1 a check failed, 2 usage, 3 not everything could be done,",
        "5 nothing was tested, 130 interrupted.",
        "",
    ]
    for family in all_families:
        lines += [f"## {family.title}", ""]
        if family.about:
            lines += [family.about, ""]
        if family.command:
            lines += [f"`attncheck {family.command}`", ""]
        lines += _table(family)
    return "\n".join(lines)


def _table(family: Family) -> list[str]:
    """Rows of a family, with a column of commands where some differ from the family's."""
    commands = [
        "" if each.command == family.command and not each.line else _command(each)
        for each in family.entries
    ]
    own = any(commands)
    heads = ["", *(["Command"] if own else []), "Exit", "It says"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for entry, command in zip(family.entries, commands, strict=True):
        message = _code(entry.says) if entry.says else "nothing: nobody could read it"
        message += f" (not yet: {entry.pending})" if entry.pending else ""
        name = entry.name.replace("|", "\\|").replace("*", "\\*").replace("__", "\\_\\_")
        lines.append(_row([name, *([command] if own else []), str(entry.code), message]))
    return [*lines, ""]


def _command(entry: Entry) -> str:
    words = entry.line.replace("$A", "attncheck") or f"attncheck {entry.command}"
    cut = words if len(words) < 160 else f"{words[:100]}…"
    return _code("".join(c if c.isprintable() else repr(c)[1:-1] for c in cut))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    """A code span within a table cell."""
    ticks = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text.replace('|', chr(92) + '|')}{pad}{ticks}"

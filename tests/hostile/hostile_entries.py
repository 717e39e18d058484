"""The table of hostile kernels and bad inputs: how it is read, run, judged and shown.

Each file of ``entries/`` holds families in TOML. A family has a ``title``, sentences (``about``),
and what its entries have unless they say otherwise; an entry has

* ``name``: what is hostile or bad, as the page says it;
* ``kernel``: the body of ``def kernel(q, k, v)`` in ``k.py``, after ``HEAD``; or ``file``: all of
  ``k.py``; ``files``: others by name; ``setup``: Python that runs in the folder before;
* ``command``: what stands after ``attncheck``; ``line``: a line of shell in its place, where
  ``$A`` is attncheck; ``environment``: variables that are otherwise (empty: none);
* ``code``: the exit code; ``says``: the line that tells the user, where … stands for anything. It
  is the first line of standard error unless a verdict was reached (codes 0, 1 and 5); empty where
  nobody can read anything;
* ``fresh``: a Python that has imported nothing, since the entry is about processes or descriptors;
* ``prints``: lines of standard error that may be the kernel's own;
* ``leaves``: files that it may leave in its folder, beside ``reports``;
* ``pending``: what is not yet as the entry says, and why.
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
_MOST_LINES = 4  # of standard error
_VERDICTS = {0, 1, 5}  # exit codes of a verdict: all others are one line of standard error
_CODES = {0, 1, 2, 3, 5, 130}
_SECONDS = 60
# An escape, another control character than tab and newline, or one that turns text round or hides.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One hostile kernel or bad input; the module says what its fields mean."""

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
        """What pytest calls it."""
        return f"{self.family}: {self.name}"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A table of the page."""

    title: str
    about: str
    command: str
    entries: tuple[Entry, ...]


def families(file: str = "*") -> list[Family]:
    """Every family, in the order of the page; or those of the files ``N_file.toml``."""
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
    """How it ends and what it says, in ``folder/work``."""
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
            # Not of this folder, lest the server seem to be left behind.
            servers.start("attncheck", {**env, "HOME": "/", "TMPDIR": ""})
            # What a kernel may change before it is needed is not made before it is asked.
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
    own = ("PYTEST_", "TRITON_INTERPRET", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    ours = {
        "COLUMNS": "200",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
    }
    if entry.fresh or entry.line:
        ours["OMP_WAIT_POLICY"] = "PASSIVE"
    else:  # as other tests have it: their server will do
        ours["TRITON_INTERPRET"] = "1"
    whole = {**kept, **ours, **entry.environment}
    return {name: value for name, value in whole.items() if value}


def mistakes(entry: Entry, folder: Path, done: subprocess.CompletedProcess[str]) -> list[str]:
    """What is not as the entry says, or as it is of every command."""
    found = []
    if done.returncode != entry.code:
        found.append(f"exit code {done.returncode}, not {entry.code}")
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    lines = [*out, *err] if entry.code in _VERDICTS else err[entry.prints :][:1]
    if not any(_pattern(entry.says).search(line) for line in lines or [""]):
        found.append(f"nothing says {entry.says!r}")
    if len(err) > _MOST_LINES + entry.prints:
        found.append(f"{len(err)} lines of standard error")
    wants_colours = "FORCE_COLOR" in entry.environment
    checks = entry.command.startswith("check") and entry.code in _VERDICTS and entry.says
    verdict = (out or [""])[0].lstrip("\x1b[0123456789;m# ")
    if checks and not verdict.startswith(("PASS ", "FAIL ", "NOTHING TESTED ")):
        found.append(f"begins without a verdict: {verdict!r}")
    if not wants_colours and (unsafe := _UNSAFE.findall(done.stdout + done.stderr)):
        found.append(f"characters {sorted(set(unsafe))} reach the terminal")
    if re.search(r'File "[^"]*\battncheck/\w', done.stdout + done.stderr):
        found.append("a traceback of ours")
    if left := _left(entry, folder):
        found.append(f"left {left}")
    if alive := _alive(folder):
        found.append(f"still run: {alive}")
    return found


def _pattern(says: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, says.split("…"))))


def _left(entry: Entry, folder: Path) -> list[str]:
    """Files that it may not leave: outside its folder, or inside beside its report."""
    outside = [path for name in ("home", "tmp") for path in (folder / name).rglob("*")]
    known = {"reports", "k.py", "__pycache__", *entry.files, *entry.leaves}
    known |= {name.partition("/")[0] for name in known}
    inside = [] if entry.setup else [p for p in (folder / "work").iterdir() if p.name not in known]
    return [
        str(path.relative_to(folder))
        for path in (*outside, *inside)
        if path.is_file() and ".cache/" not in str(path)
    ]


def _alive(folder: Path) -> list[str]:
    """Processes that work in ``folder``, or have it in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where = (process / "cwd").readlink()
            known = str(folder).encode() in (process / "environ").read_bytes()
            if known or where.is_relative_to(folder):
                found.append((process / "cmdline").read_text().replace("\0", " ")[:100])
        except OSError:  # it ended, or is another user's
            continue
    return found


# ------------------------------------------------------------------ the page


def page() -> str:
    """``docs/reference/hostile.md``."""
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
    """Rows of a family, with a column of commands where they are not all the family's."""
    commands = [
        "" if each.command == family.command and not each.line else _command(each)
        for each in family.entries
    ]
    own = any(commands)
    heads = ["", *(["Command"] if own else []), "Exit", "It says"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for entry, command in zip(family.entries, commands, strict=True):
        said = _code(entry.says) if entry.says else "nothing: nobody could read it"
        said += f" (not yet: {entry.pending})" if entry.pending else ""
        name = entry.name.replace("|", "\\|").replace("*", "\\*").replace("__", "\\_\\_")
        lines.append(_row([name, *([command] if own else []), str(entry.code), said]))
    return [*lines, ""]


def _command(entry: Entry) -> str:
    words = entry.line.replace("$A", "attncheck") or f"attncheck {entry.command}"
    cut = words if len(words) < 160 else f"{words[:100]}…"
    return _code("".join(c if c.isprintable() else repr(c)[1:-1] for c in cut))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    """A code span of a cell."""
    ticks = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text.replace('|', chr(92) + '|')}{pad}{ticks}"

"""Plant a fault: copy kernels of ours, change the copy, and load it.

A copy is a package of its own: whatever of the host imports what was changed is copied with it, and
imports the copy, so that the kernel that judges beside it stays what it is.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import attncheck
from attncheck.capabilities import named_kernels
from attncheck.core.errors import AttncheckError

if TYPE_CHECKING:
    from attncheck.faults.fault import Control, Edit, Fault, HostName

__all__ = ["COPIED", "NotPlanted", "plant"]

_ROOT = Path(attncheck.__file__).parent
_SUBJECTS = (
    *("decode", "empty_rows", "flash", "flash1", "flash2", "paged", "pages", "softmax", "traced"),
    *("varlen", "visits", "ideal", "ideal_attention", "ideal_gradients", "ideal_softmax"),
    "ideal_steps",
)
_MODS = ("block_mask", "strips")

_SHARED = {"assembler", "compilation"}  # they prepare Triton, for all kernels alike

COPIED = (
    *sorted(
        f"kernels.{file.stem}"
        for file in (_ROOT / "kernels").glob("[!_]*.py")
        if file.stem not in _SHARED
    ),
    *(f"subjects.{name}" for name in _SUBJECTS),
    *(f"mods.{name}" for name in _MODS),
)
"""Modules below attncheck that a copy has of its own, and so may be changed.

Not the interpreter's repairs, which are one for all, nor what the oracles share with kernels.
"""

_IMPORTED = re.compile(r"\battncheck\.(" + "|".join(map(re.escape, COPIED)) + r")\b")
_FROM_KERNELS = re.compile(r"\bfrom attncheck\.kernels import\b")

_KERNEL = '''"""{summary}"""

import sys
from pathlib import Path

folder = str(Path(__file__).parent)
if folder not in sys.path:
    sys.path.insert(0, folder)

from {package}.{module} import {host} as Host


class Planted(Host):
    name = "{name}"
    summary = {summary!r}
{arguments}'''

_ARGUMENTS = """
    def __init__(self, *arguments):
        super().__init__(*(arguments or {arguments!r}))
"""


class NotPlanted(AttncheckError):
    """A fault cannot be planted: the source is not what its entry says."""


def plant(fault: Fault | Control, host: HostName, folder: Path) -> str:
    """The kernel of ``host`` with ``fault`` in it, written below ``folder``.

    Args:
        fault: What is planted, one that the host has.
        host: Where.
        folder: Gets a package and a file ``<fault>_<host>.py``; what is there already is written
            again.

    Returns:
        What ``subjects.load.load`` takes: ``FILE::Planted``.

    Raises:
        NotPlanted: where a text to be changed is not found exactly once, or a module is not copied.
    """
    how = fault.hosts[host]
    label = f"{fault.id}_{host}".replace("-", "_")
    package = f"planted_{label}"
    texts = {name: _source(name) for name in COPIED}
    for edit in how.edits:
        texts[edit.module] = _edited(texts, edit, fault.id)
    shutil.rmtree(folder / package, ignore_errors=True)
    for name, text in texts.items():
        room, _, module = name.partition(".")
        path = folder / package / room / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for each in (path.parent, path.parent.parent):
            (each / "__init__.py").touch()
        path.write_text(_moved(text, package), encoding="utf-8")
    made = named_kernels.BUILTIN[how.kernel]
    kernel = folder / f"{label}.py"
    text = _KERNEL.format(
        summary=f"{fault.id}: {fault.summary}".replace('"', "'"),
        package=package,
        module=made.module.removeprefix("attncheck."),
        host=made.name,
        name=f"{fault.id} in {how.kernel}",
        arguments=_ARGUMENTS.format(arguments=made.arguments) if made.arguments else "",
    )
    kernel.write_text(text, encoding="utf-8")
    return f"{kernel}::Planted"


def _source(name: str) -> str:
    return (_ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")


def _edited(texts: dict[str, str], edit: Edit, fault: str) -> str:
    if edit.module not in texts:
        raise NotPlanted(
            f"{fault}: attncheck.{edit.module} is not copied; {', '.join(COPIED)} are."
        )
    found = texts[edit.module].count(edit.old)
    if found != 1:
        raise NotPlanted(
            f"{fault}: attncheck.{edit.module} has {edit.old!r} {found} times, not once."
        )
    return texts[edit.module].replace(edit.old, edit.new)


def _moved(text: str, package: str) -> str:
    """``text`` that imports the copies."""
    text = _IMPORTED.sub(rf"{package}.\1", text)
    return _FROM_KERNELS.sub(f"from {package}.kernels import", text)

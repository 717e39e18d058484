"""Copies of kernel sources with one text replaced: the planted faults of these tests."""

import importlib.util
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from attncheck.core.source_files import import_file

FLASH2 = ("tile", "gradient_terms", "flash2_backward")


PLANTED = tomllib.loads(Path(__file__).with_name("planted_faults.toml").read_text())
"""Kernel → name of a fault → the text that is replaced, and the question that reveals it."""


def copy_kernels(
    folder: Path, names: tuple[str, ...], where: str, right: str, wrong: str, more: str = ""
) -> SimpleNamespace:
    """Import patched copies of the kernel modules ``names``, which import each other's copies.

    Args:
        folder: Where the copies are written.
        names: Below ``attncheck.kernels``, in the order of their imports.
        where: The function or class to patch; empty: the one module that contains ``right``.
        right: The text to replace.
        wrong: Its replacement.
        more: Code appended to the last copy.

    Returns:
        Each module by its name.
    """
    copies: dict[str, ModuleType] = {}
    changed = 0
    for name in names:
        spec = importlib.util.find_spec(f"attncheck.kernels.{name}")
        assert spec is not None
        source = Path(str(spec.origin)).read_text()
        place = rf"^ *(?:def|class) {where}\b" if where else re.escape(right)
        start = re.search(place, source, re.MULTILINE)
        if start is not None:
            # Everything on the top level is followed by two empty lines.
            end = source.find("\n\n\n", start.start()) if where else len(source)
            region = source[start.start() : end]
            assert right in region, right
            source = source[: start.start()] + region.replace(right, wrong) + source[end:]
            changed += 1
        for other in names:
            source = source.replace(
                f"attncheck.kernels.{other} ", f"attncheck_file_patched_{other} "
            )
        copy = folder / f"patched_{name}.py"
        copy.write_text(source + (more if name == names[-1] else ""))
        copies[name] = import_file(copy, "a copy")
    assert changed == 1, where
    return SimpleNamespace(**copies)


def faulty(folder: Path, names: tuple[str, ...], where: str, *fault: str) -> Callable[..., Any]:
    """The function of the last of ``names``, from copies with ``fault`` planted in one of them."""
    return getattr(vars(copy_kernels(folder, names, where, *fault))[names[-1]], names[-1])


def faulty_forward(folder: Path, kernel: str, right: str, wrong: str) -> Callable[..., Any]:
    """A forward from copies of its module and of ``tile``, with a fault planted in one of them."""
    return faulty(folder, ("tile", kernel), "", right, wrong)

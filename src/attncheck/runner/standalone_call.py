"""How a script has a kernel and calls it: in plain torch where its convention can be written so."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attncheck.capabilities.configuration import entry_points, read_configuration
from attncheck.capabilities.declared import Declared
from attncheck.conventions import declarations
from attncheck.conventions.function_subject import FunctionSubject
from attncheck.core.errors import UsageError
from attncheck.subjects.torch_kernels import Flex, Sdpa

if TYPE_CHECKING:
    from attncheck.capabilities.subject import Subject
    from attncheck.inputs.problem import Problem

__all__ = ["Calling", "calling"]

_BACKENDS = {
    "sdpa-math": "MATH",
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-efficient": "EFFICIENT_ATTENTION",
    "sdpa-cudnn": "CUDNN_ATTENTION",
}
_SDPA = """\
def the_kernel():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def kernel(*tensors, **keywords):
        with sdpa_kernel(SDPBackend.{backend}):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, **keywords)

    return kernel
"""
_FLEX = """\
def the_kernel():
    import warnings

    warnings.simplefilter("ignore")  # on the speed of what is not compiled
    return {function}
"""
_FUNCTION = """\
def the_kernel():
{first}    return {had}
"""
_INTERPRETED = """\
    import os

    os.environ["TRITON_INTERPRET"] = "1"
"""
_OURS = """\
def the_kernel():
    from attncheck.examine.environment import prepare
    from attncheck.subjects.load import load_subject as load

    prepare({device!r})
    return load({spec}, {convention!r})
"""
_NATIVE = """\
def call(kernel, q, k, v):
    from attncheck.inputs import Descale, Inputs
    from attncheck.problem import Problem

    problem = Problem.from_json({problem!r})
    given = kernel.run(Inputs(problem=problem, q=q, k=k, v=v{more}))
    return given.out, given.lse
"""
_NOTE_OURS = (
    "The kernel is called through attncheck, which must be installed for this script alone."
)
_NOTE_INTERPRETED = (
    "The kernel runs in Triton's interpreter, here without attncheck's repairs: bf16 and fp8 are\n"
    "wrong in it whatever the kernel does."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """Source of a script.

    Attributes:
        kernel: ``def the_kernel()``, which imports the kernel and returns it.
        name: Name of the function that calls it.
        source: That function, of (kernel, q, k, v), which gives out and LSE.
        reads_mask: Whether it reads a global ``mask``.
        unasked_in_empty_rows: Outputs (``out``, ``lse``) that its convention leaves open in rows
            that see no key.
        notes: What a reader must know.
    """

    kernel: str
    name: str
    source: str
    reads_mask: bool
    unasked_in_empty_rows: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def calling(
    subject: Subject, problem: Problem, kernel: str, convention: str, *, device: str, folder: Path
) -> Calling:
    """How ``subject`` is had, and called on ``problem``.

    Args:
        subject: The kernel.
        problem: Of the run.
        kernel: As it was asked for.
        convention: A name of a calling convention; empty for the first that fits.
        device: ``cpu`` or ``cuda``.
        folder: Where the script will lie.

    Raises:
        UsageError: where the call cannot be written out.
    """
    inner = subject.inner if isinstance(subject, Declared) else subject
    if isinstance(inner, FunctionSubject):
        return _of_function(inner, problem, _had(kernel, folder), device)
    if problem.operation == "attention" and isinstance(inner, Sdpa | Flex):
        return _of_torch(inner, problem, device)
    spec = _spec(kernel, folder)
    scales = "descale=Descale(q=q_descale, k=k_descale, v=v_descale)"
    more = [scales] if problem.formats.scaled else []
    more += ["x=x"] if problem.operation == "softmax" else []
    more += ["sink=sink"] if problem.sink else []
    call = _NATIVE.format(problem=problem.to_json(), more="".join(f", {one}" for one in more))
    made = _OURS.format(device=device, spec=spec, convention=convention or None)
    return _named(made, call, notes=(_NOTE_OURS,))


def _of_function(inner: FunctionSubject, problem: Problem, had: str, device: str) -> Calling:
    interpreted = inner.triton and device == "cpu"
    made = _FUNCTION.format(first=_INTERPRETED if interpreted else "", had=had)
    plain = inner.options.empty_row in {"", "zero"}
    return _named(
        made,
        _source(inner, problem),
        unasked=frozenset({"lse"} if plain else {"lse", "out"}),
        notes=(_NOTE_INTERPRETED,) if interpreted else (),
    )


def _of_torch(inner: Sdpa | Flex, problem: Problem, device: str) -> Calling:
    """Attncheck's own way to torch's functions, as somebody would write it down."""
    function: Any
    if isinstance(inner, Sdpa):
        function, convention = torch.nn.functional.scaled_dot_product_attention, "sdpa"
        made = _SDPA.format(backend=_BACKENDS[inner.name])
    else:
        from torch.nn.attention.flex_attention import flex_attention

        function, convention = flex_attention, "flex"
        name = "torch.nn.attention.flex_attention.flex_attention"
        compiled = f"torch.compile({name}, fullgraph=True, dynamic=False)"
        made = _FLEX.format(function=name if device == "cpu" else compiled)
    adopted = declarations.adopted(function, inner.name, convention)
    assert isinstance(adopted, FunctionSubject), adopted
    return _named(made, _source(adopted, problem))


def _source(subject: FunctionSubject, problem: Problem) -> str:
    source = subject.render(problem)
    if source is None:
        raise UsageError(
            f"no script can be written of {problem}: its mask, score mod or dtype has no words in "
            f"the {subject.convention} convention."
        )
    return source


def _named(
    made: str, call: str, *, unasked: frozenset[str] = frozenset(), notes: tuple[str, ...] = ()
) -> Calling:
    name = f"call_{zlib.crc32(call.encode()):08x}"
    reads_mask = re.search(r"\bmask\b", call) is not None
    call = call.replace("def call(", f"def {name}(", 1)
    if "torch.nn.attention" in made + call:
        call = f"import torch.nn.attention.flex_attention\n\n\n{call}"
    return Calling(
        kernel=made.rstrip("\n"),
        name=name,
        source=call.rstrip("\n"),
        reads_mask=reads_mask,
        unasked_in_empty_rows=unasked,
        notes=notes,
    )


def _had(kernel: str, folder: Path) -> str:
    """An expression that imports a function."""
    reference, start = _reference(kernel)
    file, colons, name = reference.partition("::")
    if colons:
        return f"of_file({_relative(start / file, folder)!r}, {name!r})"
    module, _, name = reference.partition(":")
    return f"of_module({_relative(start, folder)!r}, {module!r}, {name!r})"


def _spec(kernel: str, folder: Path) -> str:
    """An expression for what ``subjects.load`` takes."""
    file, colons, name = kernel.partition("::")
    if not colons:
        return repr(kernel)
    return f"str(Path(__file__).parent / {_relative(file, folder)!r}) + {colons + name!r}"


def _reference(kernel: str) -> tuple[str, Path]:
    """What names a function, and the folder that its file or module is looked for in."""
    if ":" in kernel:
        return kernel, Path.cwd()
    project = read_configuration()
    table = project.kernels.get(kernel)
    if table is not None:
        return table.entry, project.folder
    for point in entry_points().get(kernel, ()):
        return point.value, Path.cwd()
    raise UsageError(f"no script can be written of kernel {kernel!r}: nothing says where it is.")


def _relative(path: str | os.PathLike[str], folder: Path) -> str:
    """``path`` as seen from ``folder``; absolute where there is no way."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # another drive
        return str(Path(path).resolve())

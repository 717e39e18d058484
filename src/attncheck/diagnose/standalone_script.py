"""Writes a Case as a standalone script, which needs only torch and the kernel."""

from __future__ import annotations

import base64
import os
import pprint
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core import strided_alloc
from attncheck.core.errors import UsageError
from attncheck.diagnose.reproduce import ExactRun, exact_runs
from attncheck.relations import RELATIONS
from attncheck.subjects.capabilities.configuration import entry_points, read_configuration
from attncheck.subjects.capabilities.declared import Declared
from attncheck.subjects.conventions import declarations
from attncheck.subjects.conventions.call_tensors import attention_mask
from attncheck.subjects.conventions.function_subject import FunctionSubject
from attncheck.subjects.hub_kernels import is_hub_folder
from attncheck.subjects.torch_kernels import Flex, Sdpa

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attncheck.core.judgement import Judgement
    from attncheck.core.tensor_names import TensorName
    from attncheck.inputs.problem import Case, Problem
    from attncheck.records.record import Record
    from attncheck.subjects.capabilities.subject import Subject, WrittenCall

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
    from attncheck.verify.environment import prepare
    from attncheck.subjects.load import load_subject

    prepare({device!r})
    return load_subject({spec}, {convention!r})
"""
_NATIVE = """\
def call(kernel, q, k, v):
    from attncheck.inputs.input_tensors import Descale, Inputs
    from attncheck.inputs.problem import Problem

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
class KernelCall:
    """Source text that calls a kernel on one Problem, for a script."""

    kernel: str  # ``def the_kernel()``, which imports the kernel and returns it
    name: str  # name of the function that calls it
    source: str  # that function: (kernel, q, k, v) → (out, LSE)
    reads_mask: bool  # whether it reads a global ``mask``
    # Outputs (``out``, ``lse``) that the convention leaves undefined in rows that see no key.
    unasked_in_empty_rows: frozenset[TensorName] = frozenset()
    notes: tuple[str, ...] = ()  # for the reader of the script


def kernel_call(
    subject: Subject, problem: Problem, kernel: str, convention: str, *, device: str, folder: Path
) -> KernelCall:
    """Return the source that loads ``subject`` and calls it on ``problem``.

    Args:
        folder: Where the script will lie.

    Raises:
        UsageError: where the call cannot be written out.
    """
    written = subject.written_call(problem)
    if written is not None:
        return _function_call(written, problem, _import_expression(kernel, folder), device)
    inner = subject.inner if isinstance(subject, Declared) else subject
    if problem.operation == "attention" and isinstance(inner, Sdpa | Flex):
        return _torch_call(inner, problem, device)
    spec = _load_expression(kernel, folder)
    scales = "descale=Descale(q=q_descale, k=k_descale, v=v_descale)"
    more = [scales] if problem.formats.scaled else []
    more += ["x=x"] if problem.operation == "softmax" else []
    more += ["sink=sink"] if problem.sink else []
    call = _NATIVE.format(problem=problem.to_json(), more="".join(f", {one}" for one in more))
    loading = _OURS.format(device=device, spec=spec, convention=convention or None)
    return _named_call(loading, call, notes=(_NOTE_OURS,))


def _function_call(written: WrittenCall, problem: Problem, load: str, device: str) -> KernelCall:
    interpreted = written.triton and device == "cpu"
    loading = _FUNCTION.format(first=_INTERPRETED if interpreted else "", had=load)
    # Every convention leaves LSE of a row without keys undefined; some leave out undefined, too.
    plain = written.empty_row in {"", "zero"}
    return _named_call(
        loading,
        _source(written, problem),
        unasked=frozenset({"lse"} if plain else {"lse", "out"}),
        notes=(_NOTE_INTERPRETED,) if interpreted else (),
    )


def _torch_call(inner: Sdpa | Flex, problem: Problem, device: str) -> KernelCall:
    """Return a call of torch's own function, as a user would write it."""
    function: Any
    if isinstance(inner, Sdpa):
        function, convention = torch.nn.functional.scaled_dot_product_attention, "sdpa"
        loading = _SDPA.format(backend=_BACKENDS[inner.name])
    else:
        from torch.nn.attention.flex_attention import flex_attention

        function, convention = flex_attention, "flex"
        name = "torch.nn.attention.flex_attention.flex_attention"
        compiled = f"torch.compile({name}, fullgraph=True, dynamic=False)"
        loading = _FLEX.format(function=name if device == "cpu" else compiled)
    subject = declarations.make_subject(function, inner.name, convention)
    assert isinstance(subject, FunctionSubject), subject
    return _named_call(loading, _source(subject.written_call(problem), problem))


def _source(written: WrittenCall, problem: Problem) -> str:
    if written.source is None:
        raise UsageError(
            f"no script can be written of {problem}: its mask, score mod or dtype has no words in "
            f"the {written.convention} convention."
        )
    return written.source


def _named_call(
    loading: str,
    call: str,
    *,
    unasked: frozenset[TensorName] = frozenset(),
    notes: tuple[str, ...] = (),
) -> KernelCall:
    # Named by a checksum of its text, so that runs with equal calls share one function.
    name = f"call_{zlib.crc32(call.encode()):08x}"
    reads_mask = re.search(r"\bmask\b", call) is not None
    call = call.replace("def call(", f"def {name}(", 1)
    # ``import torch`` alone does not load ``torch.nn.attention``.
    if "torch.nn.attention" in loading + call:
        call = f"import torch.nn.attention.flex_attention\n\n\n{call}"
    return KernelCall(
        kernel=loading.rstrip("\n"),
        name=name,
        source=call.rstrip("\n"),
        reads_mask=reads_mask,
        unasked_in_empty_rows=unasked,
        notes=notes,
    )


def _import_expression(kernel: str, folder: Path) -> str:
    """Return an expression that imports a function."""
    reference, start = _reference(kernel)
    file, colons, name = reference.partition("::")
    if colons:
        return f"of_file({_relative(start / file, folder)!r}, {name!r})"
    module, _, name = reference.partition(":")
    return f"of_module({_relative(start, folder)!r}, {module!r}, {name!r})"


def _load_expression(kernel: str, folder: Path) -> str:
    """Return an expression of the kernel's name for ``load_subject``."""
    file, colons, name = kernel.partition("::")
    if not colons:
        return repr(kernel)
    return f"str(Path(__file__).parent / {_relative(file, folder)!r}) + {colons + name!r}"


def _reference(kernel: str) -> tuple[str, Path]:
    """Return ``FILE::NAME`` or ``MODULE:NAME`` of a kernel, and the folder to look it up in."""
    if is_hub_folder(kernel.partition("::")[0]):
        raise UsageError(f"no script can be written of {kernel!r}: a folder of the kernels hub.")
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
    """Return ``path`` relative to ``folder``; absolute if it is on another drive."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # another drive
        return str(Path(path).resolve())


LARGEST = 2**26  # most bytes of tensors in a script: 64 MiB

_TEMPLATE = Path(__file__).with_name("standalone_text.py")
_MARK = "# --- The text of every script.\n"
_EXPORTS = '__all__ = ["main"]\n'
_BY_THE_BOUND = ("", "finite", "empty rows", "bound", "relation")

_HEAD = '''"""One question that attncheck asked of a kernel, to be asked without attncheck.

Run it with Python, where torch and the kernel are: python {name}
It says what the kernel answers beside the exact result, and what rounding may explain at most (the
deterministic bound); the exit code is 1 where the answer is beyond it, and 0 where it is within.
{notes}"""

from __future__ import annotations
'''


def render_script(  # The arguments are a question, its answer, and where the script goes.
    subject: Subject,
    case: Case,
    record: Record,
    *,
    kernel: str,
    convention: str,
    device: str,
    facts: Mapping[str, str],
    path: Path,
) -> str:
    """Return the text of a script that runs ``subject`` on ``case`` again.

    Args:
        record: The kernel's Record, which names the element that breaks a relation.
        facts: Sanitized lines that the script prints, by their labels.
        path: Where the script will lie; files are named relative to it.

    Raises:
        UsageError: for tensors that are too large, a call that cannot be written out, or a
            question that cannot be asked.
    """
    if case.problem.backward:
        raise UsageError("the script would ask for out and LSE: it cannot ask for gradients.")
    run_list = exact_runs(subject, case, device=device)
    size = sum(
        tensor.nbytes
        for run in run_list
        for each in (run.inputs.tensors(), run.exact.tensors(), run.allowed.tensors())
        for tensor in each.values()
    )
    if size > LARGEST:
        raise UsageError(
            f"the script would hold {size >> 20} MiB of tensors: it may hold {LARGEST >> 20} MiB."
        )
    memory = _Memory()
    calls = [
        kernel_call(
            subject, run.inputs.problem, kernel, convention, device=device, folder=path.parent
        )
        for run in run_list
    ]
    data = {
        "title": " ".join([case.question, *(f"{k}={v}" for k, v in case.parameters.items())]),
        "facts": dict(facts),
        "device": device,
        # torch's name for tf32 products, which the script has to set in its own process.
        "products": "high" if case.problem.dtype == "tf32" else "highest",
        "must": _relation_data(record.judgement) if case.question in RELATIONS else None,
        "note": _blind_note(record.judgement),
        "runs": [_run_data(run, one, memory) for run, one in zip(run_list, calls, strict=True)],
    }
    notes = "".join(f"\n{line}\n" for one in calls[:1] for line in one.notes)
    imports, text = _common_text()
    head = f"{_HEAD.format(name=path.name, notes=notes)}\n{imports}"
    # The source that loads the kernel, and each different call of it, once.
    sources = dict.fromkeys(source for one in calls for source in (one.kernel, one.source))
    return "\n\n\n".join([head, *sources, text, *_data_text(data, calls, memory)]) + "\n"


def _common_text() -> tuple[str, str]:
    """Return the imports and the functions that all scripts share."""
    text = _TEMPLATE.read_text(encoding="utf-8").partition(_MARK)[2]
    imports, _, functions = text.partition(_EXPORTS)
    return imports.strip("\n"), functions.strip("\n")


class _Memory:
    """Contents of tensors' memory by name, stored once for all views of it."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, str]] = {}
        self._names: dict[tuple[str, bytes], str] = {}

    def view(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Store a tensor's memory; return its name, the shape, strides and offset in elements."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        far = strided_alloc.has_far_rows(tensor)
        # Include gaps, because a wrong kernel may read them, unless they take gibibytes.
        whole = tensor.detach() if far else tensor.detach().as_strided((size,), (1,), 0)
        whole = whole.cpu().contiguous().flatten()
        raw = whole.view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        name = self._names.setdefault((dtype, raw), f"m{len(self._names)}")
        self.held[name] = dtype, base64.b64encode(zlib.compress(raw)).decode()
        return {
            "memory": name,
            "shape": tuple(tensor.shape),
            "stride": tuple(tensor.stride()),
            "offset": tensor.storage_offset(),
        } | ({"within": size} if far else {})


def _run_data(run: ExactRun, call: KernelCall, memory: _Memory) -> dict[str, Any]:
    """Return the data of a run: its call, inputs, exact outputs and allowances."""
    inputs, problem = run.inputs.tensors(), run.inputs.problem
    if call.reads_mask:
        inputs["mask"] = attention_mask(problem, str(run.inputs.device))
    exact, allowed = run.exact.tensors(), run.allowed.tensors()
    empty = exact["lse"].isneginf()
    data: dict[str, Any] = {
        "call": call.name,
        "inputs": {name: memory.view(tensor) for name, tensor in inputs.items()},
        "dtype": str(problem.formats.output.torch_dtype),
    }
    # An allowance of NaN lets the script accept anything there.
    for name in call.unasked_in_empty_rows:
        rows = empty if name == "lse" else empty[..., None]
        allowed[name] = torch.where(rows, torch.nan, allowed[name])
    for name in exact:
        data[name] = {
            part: memory.view(outputs[name].cpu().contiguous())
            for part, outputs in (("exact", exact), ("allowed", allowed))
        }
    return data


def _relation_data(judgement: Judgement | None) -> dict[str, Any] | None:
    """Return the element that breaks a relation; None where the relation holds."""
    if judgement is None or judgement.worst is None or judgement.rule != "relation":
        return None
    worst = judgement.worst
    place = (worst.at.batch, worst.at.head, worst.at.query, worst.at.dim)
    return {
        "tensor": worst.tensor,
        "place": place if worst.at.dim >= 0 else place[:3],
        "value": worst.exact,
        "allowed": worst.allowance,
        "signed": worst.got == worst.exact == 0,
    }


def _blind_note(judgement: Judgement | None) -> str:
    if judgement is None or judgement.status != "fail" or judgement.rule in _BY_THE_BOUND:
        return ""
    return (
        f"attncheck failed it by the rule {judgement.rule!r}, which needs more than the "
        "deterministic bound: this script cannot show it"
    )


def _data_text(data: dict[str, Any], calls: list[KernelCall], memory: _Memory) -> Iterator[str]:
    """Yield the parts of the script that hold its data, the memory of tensors and the main call."""
    text = pprint.pformat(data, width=96, sort_dicts=False)
    for name in {one.name for one in calls}:  # a name in the data, a function in the script
        text = text.replace(f"'call': {name!r}", f"'call': {name}")
    yield f"nan, inf = math.nan, math.inf\n\nASKED: dict[str, Any] = {text}"
    yield 'ASKED["kernel"] = the_kernel'
    lines = ["# Memory of the tensors: its dtype, and its bytes."]
    for name, (dtype, encoded) in memory.held.items():
        wrapped = "\n".join(encoded[at : at + 96] for at in range(0, len(encoded), 96))
        lines.append(f'ASKED.setdefault("memory", {{}})[{name!r}] = {dtype!r}, """\n{wrapped}\n"""')
    yield "\n".join(lines)
    yield 'if __name__ == "__main__":\n    sys.exit(main(ASKED, globals()))'

"""A Case as a script that needs torch and the kernel alone: inputs, results and bounds inlined."""

from __future__ import annotations

import base64
import pprint
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attncheck.conventions.call_tensors import attention_mask
from attncheck.core import strided_alloc
from attncheck.core.errors import UsageError
from attncheck.diagnose.reproduce import ExactRun, exact_runs
from attncheck.relations import RELATIONS
from attncheck.runner.standalone_call import Calling, calling

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attncheck.capabilities.subject import Subject
    from attncheck.core.judgement import Judgement
    from attncheck.inputs.problem import Case
    from attncheck.records.record import Record

__all__ = ["LARGEST", "script"]

LARGEST = 2**26
"""Bytes of the tensors of the largest script that is written: 64 MiB."""

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


def script(  # what was asked of whom, what was answered, and where it goes
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
    """The text of a script that asks ``case`` of ``subject`` again.

    Args:
        subject: The kernel.
        case: What is asked.
        record: What it answered: of a relation, the element that shows it.
        kernel: As it was asked for.
        convention: A name of a calling convention; empty for the first that fits.
        device: ``cpu`` or ``cuda``.
        facts: What the script says of itself, harmless lines by their names.
        path: Where it will lie: files are named relative to it.

    Raises:
        UsageError: for tensors that are too large, a call that cannot be written out, or a
            question that cannot be asked.
    """
    if case.problem.backward:
        raise UsageError("the script would ask for out and LSE: it cannot ask for gradients.")
    asked = exact_runs(subject, case, device=device)
    size = sum(t.nbytes for run in asked for t in _tensors(run, {}))
    if size > LARGEST:
        raise UsageError(
            f"the script would hold {size >> 20} MiB of tensors: it may hold {LARGEST >> 20} MiB."
        )
    memory = _Memory()
    how = [
        calling(subject, run.inputs.problem, kernel, convention, device=device, folder=path.parent)
        for run in asked
    ]
    said = {
        "title": " ".join([case.question, *(f"{k}={v}" for k, v in case.parameters.items())]),
        "facts": dict(facts),
        "device": device,
        "products": "high" if case.problem.dtype == "tf32" else "highest",
        "must": _must(record.judgement) if case.question in RELATIONS else None,
        "note": _note(record.judgement),
        "runs": [_told(run, one, memory) for run, one in zip(asked, how, strict=True)],
    }
    notes = "".join(f"\n{line}\n" for one in how[:1] for line in one.notes)
    imports, text = _common()
    head = f"{_HEAD.format(name=path.name, notes=notes)}\n{imports}"
    return "\n\n\n".join([head, *_calls(how), text, *_data(said, how, memory)]) + "\n"


def _common() -> tuple[str, str]:
    """Imports and functions of every script."""
    text = _TEMPLATE.read_text(encoding="utf-8").partition(_MARK)[2]
    imports, _, functions = text.partition(_EXPORTS)
    return imports.strip("\n"), functions.strip("\n")


class _Memory:
    """Tensors' memory by name, each once however many tensors are views of it."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, str]] = {}
        self._names: dict[tuple[str, bytes], str] = {}

    def view(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Where it lies, its shape and its strides."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        far = strided_alloc.has_far_rows(tensor)
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


def _tensors(run: ExactRun, more: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from run.inputs.tensors().values()
    yield from more.values()
    for outputs in (run.exact, run.allowed):
        yield from (part for part in (outputs.out, outputs.lse) if part is not None)


def _told(run: ExactRun, how: Calling, memory: _Memory) -> dict[str, Any]:
    """A run as data."""
    inputs, problem = run.inputs.tensors(), run.inputs.problem
    if how.reads_mask:
        inputs["mask"] = attention_mask(problem, str(run.inputs.device))
    empty = run.exact.lse.isneginf() if run.exact.lse is not None else torch.tensor(data=False)
    allowed = {"out": run.allowed.out, "lse": run.allowed.lse}
    told: dict[str, Any] = {
        "call": how.name,
        "inputs": {name: memory.view(tensor) for name, tensor in inputs.items()},
        "dtype": str(problem.formats.output.torch_dtype),
    }
    for name, exact in (("out", run.exact.out), ("lse", run.exact.lse)):
        bound = allowed[name]
        assert exact is not None, "the oracle gives LSE"
        assert bound is not None, "the judge bounds it"
        if name in how.unasked_in_empty_rows:
            rows = empty if name == "lse" else empty[..., None]
            bound = torch.where(rows, torch.nan, bound)
        told[name] = {
            part: memory.view(tensor.cpu().contiguous())
            for part, tensor in (("exact", exact), ("allowed", bound))
        }
    return told


def _must(found: Judgement | None) -> dict[str, Any] | None:
    """The element that a broken relation shows; None where it held."""
    if found is None or found.worst is None or found.rule != "relation":
        return None
    worst = found.worst
    place = (worst.at.batch, worst.at.head, worst.at.query, worst.at.dim)
    return {
        "tensor": worst.tensor,
        "place": place if worst.at.dim >= 0 else place[:3],
        "value": worst.exact,
        "allowed": worst.allowance,
        "signed": worst.got == worst.exact == 0,
    }


def _note(found: Judgement | None) -> str:
    if found is None or found.status != "fail" or found.rule in _BY_THE_BOUND:
        return ""
    return (
        f"attncheck failed it by the rule {found.rule!r}, which needs more than the deterministic "
        "bound: this script cannot show it"
    )


def _calls(how: list[Calling]) -> Iterator[str]:
    """How the kernel is had, and each way it is called, once."""
    yield from dict.fromkeys(source for one in how for source in (one.kernel, one.source))


def _data(said: dict[str, Any], how: list[Calling], memory: _Memory) -> Iterator[str]:
    """What was asked, and the memory of its tensors."""
    text = pprint.pformat(said, width=96, sort_dicts=False)
    for name in {one.name for one in how}:  # functions, where data has their names
        text = text.replace(f"'call': {name!r}", f"'call': {name}")
    yield f"nan, inf = math.nan, math.inf\n\nASKED: dict[str, Any] = {text}"
    yield 'ASKED["kernel"] = the_kernel'
    lines = ["# Memory of the tensors: its dtype, and its bytes."]
    for name, (dtype, encoded) in memory.held.items():
        wrapped = "\n".join(encoded[at : at + 96] for at in range(0, len(encoded), 96))
        lines.append(f'ASKED.setdefault("memory", {{}})[{name!r}] = {dtype!r}, """\n{wrapped}\n"""')
    yield "\n".join(lines)
    yield 'if __name__ == "__main__":\n    sys.exit(main(ASKED, globals()))'

"""Mutants of a kernel's source: each has one small change by a rule, and all are reproducible.

A rule looks at one node of the syntax tree and yields its replacements. Only the text of that node
is rewritten, so that a mutant differs from its source in a line or two. The rules know nothing of
attention, or of attncheck's questions.
"""

from __future__ import annotations

import ast
import copy
import difflib
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from attncheck.core.errors import UsageError, require_known

_INDEX_CALLS = frozenset({"range", "arange", "cdiv", "minimum", "maximum"})
_ARITHMETIC = frozenset({"dot", "matmul", "sum", "exp", "exp2", "log", "log2"})
_LOG2_E = 1.4426950408889634
_SENTINEL = -1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One changed source."""

    id: str  # ``kernel:operator:line:column``, with a number where that is not unique
    operator: str
    line: int
    text: str  # the whole file
    diff: str
    code: str  # the original of the changed line


@dataclass(frozen=True, slots=True)
class _Site:
    """A node of the syntax tree, with its parents and its function's names."""

    node: ast.AST
    parents: tuple[ast.AST, ...]  # the innermost last
    roles: dict[str, list[str]]  # names in the function, by the kind of thing that they stand for

    @property
    def parent(self) -> ast.AST:
        return self.parents[-1]


def _called_name(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _with_fields(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _plus(node: ast.AST, number: int) -> ast.AST:
    operation = ast.Add() if number > 0 else ast.Sub()
    return ast.BinOp(copy.deepcopy(node), operation, ast.Constant(abs(number)))  # type: ignore[arg-type]


def _off_by_one(site: _Site) -> Iterator[ast.AST]:
    """Change by one: integers in sums and comparisons, ends of ranges, bounds of inequalities."""
    node, parent = site.node, site.parent
    if isinstance(node, ast.Constant) and type(node.value) is int:
        of_sum = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub)
        if of_sum or isinstance(parent, ast.Compare) or _called_name(parent) in _INDEX_CALLS:
            yield from (ast.Constant(node.value + one) for one in (1, -1))
        return
    if isinstance(node, ast.Name | ast.BinOp | ast.Attribute):
        compared = isinstance(parent, ast.Compare) and node is not parent.left
        ordered = compared and isinstance(parent.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)  # type: ignore[attr-defined]
        bound = _called_name(parent) == "range" and node in parent.args[:2]  # type: ignore[attr-defined]
        if ordered or bound:
            yield from (_plus(node, one) for one in (1, -1))


def _swap_operands(site: _Site) -> Iterator[ast.AST]:
    node = site.node
    swapped = ast.Sub | ast.Div | ast.FloorDiv | ast.Mod | ast.MatMult
    if isinstance(node, ast.BinOp) and isinstance(node.op, swapped):
        yield _with_fields(node, left=node.right, right=node.left)
    if isinstance(node, ast.Call) and _called_name(node) in {"where", "matmul", "dot"}:
        *first, one, other = node.args
        yield _with_fields(node, args=[*first, other, one])


_FLIPS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
}


def _flip_comparison(site: _Site) -> Iterator[ast.AST]:
    if isinstance(site.node, ast.Compare):
        for other in _FLIPS.get(type(site.node.ops[0]), ()):
            yield _with_fields(site.node, ops=[other()])


def _drop_statement(site: _Site) -> Iterator[ast.AST]:
    """Drop updates of a name, stores, and conditions or their bodies."""
    node = site.node
    if isinstance(node, ast.AugAssign):
        yield ast.Pass()
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        reads = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
        if name in reads:
            yield ast.Pass()
    if isinstance(node, ast.Expr) and _called_name(node.value) == "store":
        yield ast.Pass()
    if isinstance(node, ast.If) and not any(isinstance(one, ast.Raise) for one in node.body):
        yield from (_with_fields(node, test=ast.Constant(value)) for value in (False, True))


def _wrong_index(site: _Site) -> Iterator[ast.AST]:
    """Use another name of the same kind, or another axis of a shape or grid."""
    node, parent = site.node, site.parent
    # All tensors of a call have the same device and dtype: another tensor's makes no difference.
    same = isinstance(parent, ast.Attribute) and parent.attr in {"device", "dtype"}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not same:
        for names in site.roles.values():
            if node.id in names and len(names) > 1:
                at = names.index(node.id)
                others = {names[(at + 1) % len(names)]: None, names[at - 1]: None}
                yield from (ast.Name(other, ast.Load()) for other in others)
                return
    if isinstance(node, ast.Constant) and type(node.value) is int:
        of_shape = isinstance(parent, ast.Subscript) and ast.unparse(parent.value).endswith("shape")
        if of_shape or _called_name(parent) in {"program_id", "stride", "num_programs"}:
            yield ast.Constant((node.value + 1) % 3)
            if of_shape:
                yield ast.Constant(node.value - 1 if node.value else 2)


def _narrow_dtype(site: _Site) -> Iterator[str]:
    """Round a result of arithmetic to fp16."""
    node = site.node
    if not isinstance(node, ast.Assign | ast.AugAssign):
        return
    value = node.value
    if any(_called_name(one) in _ARITHMETIC for one in ast.walk(value)) or any(
        isinstance(one, ast.BinOp) and isinstance(one.op, ast.MatMult) for one in ast.walk(value)
    ):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        sign = "=" if isinstance(node, ast.Assign) else _SIGNS[type(node.op)] + "="
        narrow = ".to({0}.float16).to({0}.float32)".format(
            "tl" if any(_is_jit(one) for one in site.parents) else "torch"
        )
        yield f"{ast.unparse(target)} {sign} ({ast.unparse(value)}){narrow}"


_SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def _is_jit(node: ast.AST) -> bool:
    decorators = isinstance(node, ast.FunctionDef) and node.decorator_list
    return bool(decorators) and any(ast.unparse(one).endswith("jit") for one in decorators)  # type: ignore[union-attr]


def _drop_mask(site: _Site) -> Iterator[ast.AST]:
    """Drop the mask of a load or store, its ``other``, or either part of a conjunction."""
    node = site.node
    if isinstance(node, ast.Call) and _called_name(node) in {"load", "store"}:
        for dropped in ({"mask", "other"}, {"other"}):
            keywords = [one for one in node.keywords if one.arg not in dropped]
            if len(keywords) < len(node.keywords):
                yield _with_fields(node, keywords=keywords)
    if isinstance(node, ast.Call) and _called_name(node) == "masked_fill":
        yield node.func.value  # type: ignore[attr-defined]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        yield from (node.left, node.right)


def _change_constant(site: _Site) -> Iterator[ast.AST]:
    """Replace infinity by a finite sentinel or 0, other floats by 1 (1 by 2) or × log2 e."""
    node, parent = site.node, site.parent
    infinite = ast.unparse(node) in {'float("inf")', "float('inf')", "float('-inf')", "torch.inf"}
    if infinite:
        negative = "-inf" in ast.unparse(node)
        yield from (ast.Constant(_SENTINEL if negative else -_SENTINEL), ast.Constant(0.0))
    if isinstance(node, ast.Constant) and isinstance(node.value, float):
        new = {0.0: 1.0, 1.0: 2.0}.get(node.value, 1.0)
        yield ast.Constant(new)
        if node.value not in {0.0, 1.0} and not isinstance(parent, ast.UnaryOp):
            yield ast.Constant(node.value * _LOG2_E)


def _drop_term(site: _Site) -> Iterator[ast.AST]:
    """Drop either operand of a sum or product, or the right one of another operation."""
    node = site.node
    if not isinstance(node, ast.BinOp):
        return
    if isinstance(node.op, ast.Add | ast.Mult):
        yield from (node.left, node.right)
    if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod | ast.Pow):
        yield node.left


_OPPOSITES: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
}


def _flip_operator(site: _Site) -> Iterator[ast.AST]:
    node = site.node
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPPOSITES:
        yield _with_fields(node, op=_OPPOSITES[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand


_OTHER_REDUCTION = {"sum": "max", "max": "sum", "amax": "sum"} | {
    "maximum": "minimum",
    "minimum": "maximum",
    "exp": "exp2",
    "exp2": "exp",
    "log": "log2",
    "log2": "log",
}


def _swap_function(site: _Site) -> Iterator[ast.AST]:
    """Swap sum and max, maximum and minimum, or base e and base 2; or use another axis."""
    node = site.node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if other := _OTHER_REDUCTION.get(node.func.attr):
            yield _with_fields(node, func=_with_fields(node.func, attr=other))
        if node.func.attr in {"sum", "max"} and len(node.args) == 2:
            axis = node.args[1]
            if isinstance(axis, ast.Constant):
                yield _with_fields(node, args=[node.args[0], ast.Constant(1 - int(axis.value))])  # type: ignore[arg-type]


def _transpose(site: _Site) -> Iterator[ast.AST]:
    """Drop a transposition, or swap the axes of ``[:, None]`` and ``[None, :]``."""
    node = site.node
    if isinstance(node, ast.Call) and _called_name(node) == "trans":
        yield node.args[0]
    if isinstance(node, ast.Call) and _called_name(node) == "transpose":
        yield node.func.value  # type: ignore[attr-defined]
    if isinstance(node, ast.Attribute) and node.attr in {"T", "mT"}:
        yield node.value
    index = node.slice if isinstance(node, ast.Subscript) else None
    if isinstance(index, ast.Tuple) and sorted(map(ast.unparse, index.elts)) == [":", "None"]:
        yield _with_fields(node, slice=_with_fields(index, elts=index.elts[::-1]))


OPERATORS: dict[str, Callable[[_Site], Iterator[ast.AST | str]]] = {
    "off-by-one": _off_by_one,
    "swap-operands": _swap_operands,
    "flip-comparison": _flip_comparison,
    "drop-statement": _drop_statement,
    "wrong-index": _wrong_index,
    "narrow-dtype": _narrow_dtype,
    "drop-mask": _drop_mask,
    "change-constant": _change_constant,
    "drop-term": _drop_term,
    "flip-operator": _flip_operator,
    "swap-function": _swap_function,
    "transpose": _transpose,
}
"""Rules by name; each maps a site to its replacements."""


def mutants_of(kernel: str, source: str, operators: Sequence[str] = ()) -> list[Mutant]:
    """Return every mutant of a file's functions, ordered by place and then by rule.

    If two rules give the same code, only the first one's mutant counts; code that equals the
    source's own gives none.

    Args:
        kernel: First part of the ids.
        source: Text of the file.
        operators: Names of rules; empty for all.

    Raises:
        UnknownName: for an unknown rule.
        UsageError: for a source that is not valid Python.
    """
    require_known("operator", operators, OPERATORS)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(f"{kernel} is no Python: {error}.") from None
    lines, known_code = source.splitlines(keepends=True), set[bytes]()
    mutants, labels = [], Counter[str]()
    sites = [*_sites(tree)]
    sites.sort(key=lambda site: (site.node.lineno, site.node.col_offset))  # type: ignore[attr-defined]
    for site in sites:
        if isinstance(site.node, ast.stmt):
            known_code.add(_replace(lines, site, ast.unparse(site.node))[1] or b"")
        for name in operators or OPERATORS:
            for new in OPERATORS[name](site):
                text, code = _replace(lines, site, new)
                # Skip text that is not valid Python, and programs that are known already.
                if code is None or code in known_code:
                    continue
                known_code.add(code)
                node = site.node
                label = f"{kernel}:{name}:{node.lineno}:{node.col_offset}"  # type: ignore[attr-defined]
                labels[label] += 1
                mutants.append(
                    Mutant(
                        id=f"{label}.{labels[label]}" if labels[label] > 1 else label,
                        operator=name,
                        line=node.lineno,  # type: ignore[attr-defined]
                        text=text,
                        diff=_diff(source, text),
                        code=lines[node.lineno - 1].strip(),  # type: ignore[attr-defined]
                    )
                )
    return mutants


class _SignFolder(ast.NodeTransformer):
    """Folds a minus sign into its number, as Python's compiler does."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:  # ast's name
        self.generic_visit(node)
        inner = node.operand
        number = isinstance(inner, ast.Constant) and isinstance(inner.value, int | float)
        if number and isinstance(node.op, ast.USub):
            return ast.Constant(-inner.value)  # type: ignore[attr-defined]
        return node


def _sites(tree: ast.Module) -> Iterator[_Site]:
    """Yield each node in bodies of functions (not parameters), except in ``raise`` statements."""
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    for function in functions:
        roles = _roles(function)
        todo: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [
            (one, (function,)) for one in function.body
        ]
        while todo:
            node, parents = todo.pop()
            if isinstance(node, ast.FunctionDef | ast.Raise):
                continue
            # Nodes without a place in the text, such as operators and contexts, cannot be replaced.
            if hasattr(node, "lineno") and hasattr(node, "end_col_offset"):
                yield _Site(node, parents, roles)
            todo += [(child, (*parents, node)) for child in ast.iter_child_nodes(node)]


def _roles(function: ast.FunctionDef) -> dict[str, list[str]]:
    """Return names in a function that may be confused: strides, tensors, programs, offsets."""
    roles: dict[str, list[str]] = {}
    names = [one.arg for one in function.args.args]
    strides = [name for name in names if "stride" in name or _is_short_stride(name)]
    roles["stride"] = strides
    roles["tensor"] = [
        n for n in names if n.lower().removesuffix("_ptr").removesuffix("_cache") in {"q", "k", "v"}
    ]
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name, value = node.targets[0].id, ast.unparse(node.value)
        if "program_id" in value and "arange" not in value:
            roles.setdefault("program", []).append(name)
        elif "arange" in value:
            roles.setdefault("offset", []).append(name)
        elif isinstance(node.value, ast.BinOp) and isinstance(
            node.value.op, ast.FloorDiv | ast.Mod
        ):
            roles.setdefault("program", []).append(name)
    return {role: list(dict.fromkeys(each)) for role, each in roles.items()}


def _is_short_stride(name: str) -> bool:
    """Return whether a parameter has a name such as ``q_b`` or ``s_kp``."""
    first, _, last = name.partition("_")
    return bool(last) and len(first) == 1 and len(last) <= 2 and first in "qkvos"


def _replace(lines: list[str], site: _Site, new: ast.AST | str) -> tuple[str, bytes | None]:
    """Return the text with one node replaced, in brackets if needed, and the statement's code.

    The code identifies the changed statement and its line; None if it is not valid Python.
    """
    node = site.node
    text = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
    if isinstance(new, ast.BinOp | ast.UnaryOp | ast.Compare) and not isinstance(node, ast.stmt):
        text = f"({text})"
    if isinstance(node, ast.stmt):
        text = text.replace("\n", f"\n{' ' * node.col_offset}")
    first, last = node.lineno - 1, node.end_lineno  # type: ignore[attr-defined]
    # Columns are bytes of UTF-8.
    before = lines[first].encode()[: node.col_offset].decode()  # type: ignore[attr-defined]
    after = lines[last - 1].encode()[node.end_col_offset :].decode()  # type: ignore[attr-defined]
    statement = next(one for one in (node, *site.parents[::-1]) if isinstance(one, ast.stmt))
    begin, end = statement.lineno - 1, statement.end_lineno or 0
    around = [*lines[begin:first], before + text + after, *lines[last:end]]
    try:
        tree = ast.parse(textwrap.dedent("".join(around)))
    except (SyntaxError, ValueError):
        code = None
    else:
        code = f"{begin} {ast.dump(_SignFolder().visit(tree))}".encode()
    return "".join([*lines[:begin], *around, *lines[end:]]), code


def _diff(source: str, text: str) -> str:
    both = difflib.unified_diff(source.splitlines(), text.splitlines(), n=0, lineterm="")
    return "\n".join([line for line in both if not line.startswith(("---", "+++", "@@"))])

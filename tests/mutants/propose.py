"""Propose mutations of a file for `mutations.yaml` or `kernels.yaml`: a random sample, the same in every run.

    python -m tests.mutants.propose measure/paired.py 10

Candidates are swapped comparisons, arithmetic, `and`/`or`, `min`/`max`, `any`/`all` and floor/ceil, dropped `not`s and
calls, `break` for `continue`, flipped booleans, and numbers that are off by one or doubled. Left out by rule are
messages (f-strings, `raise`, printing), annotations, decorators, default arguments, assertions, module constants,
integers above 2 and floats below 1e-6, which are limits and tolerances, powers such as 2**20, path joins, and arguments
such as `strict`, which only check what already holds. A line is changed once at most.

In C++ and CUDA sources, candidates are operators and small integers as text, outside of comments and the preprocessor.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "smelt"

_COMPARISONS = {
    ast.Lt: (" < ", " <= "), ast.LtE: (" <= ", " < "), ast.Gt: (" > ", " >= "), ast.GtE: (" >= ", " > "),
    ast.Eq: (" == ", " != "), ast.NotEq: (" != ", " == "), ast.Is: (" is ", " is not "), ast.In: (" in ", " not in "),
    ast.IsNot: (" is not ", " is "), ast.NotIn: (" not in ", " in "),
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}  # fmt: skip
_NAMES = {"min": "max", "any": "all", "argmax": "argmin", "amax": "amin", "floor": "ceil"}
_NAMES |= {new: old for old, new in _NAMES.items()}
_IGNORED_ARGUMENTS = ("strict", "missing_ok", "exist_ok", "parents", "ignore_errors", "keepdim", "keepdims")
_MESSAGES = ("_say", "say", "print", "progress.advance", "warn")
_PATHS = ("path", "folder", "parent", "root")
_LARGEST_INTEGER, _SMALLEST_FLOAT = 2, 1e-6

Change = tuple[int, int, int, str]  # line, first and last column in bytes, new text


class _Candidates(ast.NodeVisitor):
    """Collect the possible changes of a file."""

    def __init__(self, source: str) -> None:
        self.lines = source.encode().split(b"\n")
        self.changes: list[Change] = []
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.visit(statement)

    def _replace(self, node: ast.expr | ast.stmt, new: str, width: int | None = None) -> None:
        """Replace a node of one line, or its last `width` characters."""
        if node.end_lineno == node.lineno and node.end_col_offset is not None:
            start = node.col_offset if width is None else node.end_col_offset - width
            self.changes.append((node.lineno, start, node.end_col_offset, new))

    def _replace_between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            text = self.lines[right.lineno - 1][left.end_col_offset : right.col_offset].decode()
            if text.count(old) == 1:
                self.changes.append((right.lineno, left.end_col_offset, right.col_offset, text.replace(old, new)))

    def _visit_body(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_body

    def _skip(self, node: ast.AST) -> None:
        pass

    visit_Raise = visit_JoinedStr = visit_Import = visit_ImportFrom = visit_Assert = _skip

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _IGNORED_ARGUMENTS:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            self._replace_between(left, right, *_COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_number = not any(isinstance(part, ast.List | ast.Tuple | ast.JoinedStr) for part in (node.left, node.right))
        is_number = is_number and not isinstance(getattr(node.right, "value", None), str)
        is_number = is_number and not isinstance(getattr(node.left, "value", None), str | bytes)
        if isinstance(node.op, ast.Pow) and isinstance(node.left, ast.Constant):  # 2**20
            return
        is_number = is_number and not ast.unparse(node.left).endswith(_PATHS) and "Path(" not in ast.unparse(node.left)
        if type(node.op) in _ARITHMETIC and is_number:
            self._replace_between(node.left, node.right, *_ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace_between(left, right, *words)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            text = self.lines[node.lineno - 1][node.operand.col_offset : node.end_col_offset]
            self._replace(node, text.decode())
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int) and value <= _LARGEST_INTEGER:
            self._replace(node, str(value + 1))
        elif isinstance(value, float) and abs(value) >= _SMALLEST_FLOAT:
            self._replace(node, repr(value * 2))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in _NAMES:
            self._replace(node, _NAMES[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _NAMES:
            self._replace(node, _NAMES[node.attr], len(node.attr))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not ast.unparse(node.value.func).endswith(_MESSAGES):
            self._replace(node, "pass")
            self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break")


_CPP_OPERATORS = {
    " + ": " - ", " - ": " + ", " * ": " + ", " / ": " * ", " % ": " / ", " < ": " <= ", " <= ": " < ", " > ": " >= ",
    " == ": " != ", " != ": " == ", " && ": " || ", " || ": " && ", " << ": " >> ", " >> ": " << ", " & ": " | ",
    " | ": " ^ ", " ^ ": " | ", "min(": "max(", "max(": "min(",
}  # fmt: skip
_CPP_CHANGE = re.compile("|".join(map(re.escape, _CPP_OPERATORS)) + r"|(?<![\w.])[012](?![\w.])")
_CPP_SKIPPED = ("#", "//", "*", "template", "typedef", "static_assert", "constexpr", "using", "namespace", '"')


def _cpp_changes(lines: list[bytes]) -> list[Change]:
    """Return the possible changes of a C++ or CUDA source."""
    changes = []
    for number, line in enumerate(lines, 1):
        code = line.decode().partition("//")[0]
        if code.strip().startswith(_CPP_SKIPPED) or "asm" in code or ("for (" in code and "++" not in code):
            continue
        for match in _CPP_CHANGE.finditer(code):
            new = _CPP_OPERATORS.get(match[0]) or str(int(match[0]) + 1)
            start = len(code[: match.start()].encode())
            changes.append((number, start, start + len(match[0].encode()), new))
    return changes


def propose(file: str, count: int) -> list[tuple[str, str]]:
    """Return at most `count` pairs of a line that occurs once in the file and its replacement."""
    source = (SOURCE / file).read_text()
    lines = source.encode().split(b"\n")
    changes = _Candidates(source).changes if file.endswith(".py") else _cpp_changes(lines)
    stripped = [line.strip() for line in lines]
    random.Random(file).shuffle(changes)
    chosen: dict[int, tuple[str, str]] = {}
    for number, start, end, new in changes:
        line = lines[number - 1]
        if number not in chosen and stripped.count(line.strip()) == 1 and len(chosen) < count:
            chosen[number] = line.decode().strip(), (line[:start] + new.encode() + line[end:]).decode().strip()
    return [pair for _, pair in sorted(chosen.items())]


if __name__ == "__main__":
    for before, after in propose(sys.argv[1], int(sys.argv[2])):
        print(f"    - [{json.dumps(before, ensure_ascii=False)}, {json.dumps(after, ensure_ascii=False)}]")

"""What a Python module defines, function by function, each with a digest that ignores the layout."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from functools import lru_cache

MODULE = "<module>"
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Symbol:
    """A function, a method, or what remains of a class or a module without them.

    digest: sha256 of the syntax tree without positions, so neither comments nor blank lines count.
    spans: first and last line of each definition (decorators included), 1-based.
    """

    digest: str
    spans: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def symbols(source: bytes | str) -> dict[str, Symbol]:
    """Map `Class.method`, `function`, `Class` and `<module>` to their Symbol.

    A function inside a function belongs to the outer one. A name that is defined twice (a property's setter,
    an overload, the two arms of an `if`) is one symbol with two spans.

    Raises:
        SyntaxError: the source is not Python.
    """
    found: dict[str, list[tuple[str, int, int]]] = {}

    def dump(node: object, scope: tuple[str, ...] | None) -> str:
        """Text of `node`. scope: the enclosing classes, or None inside a function."""
        if isinstance(node, list):
            return f"[{','.join(dump(n, scope) for n in node)}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if scope is not None and isinstance(node, (*FUNCTION, ast.ClassDef)):
            name = (*scope, node.name)
            text = fields(node, name if isinstance(node, ast.ClassDef) else None)
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found.setdefault(".".join(name), []).append((text, first, node.end_lineno or node.lineno))
            return f"<{node.name}>"
        return fields(node, scope)

    def fields(node: ast.AST, scope: tuple[str, ...] | None) -> str:
        # Newer Pythons add fields (type_params). Leaving empty ones out keeps the digest the same.
        inner = (f"{k}={dump(v, scope)}" for k, v in ast.iter_fields(node) if v is not None and v != [])
        return f"{type(node).__name__}({','.join(inner)})"

    tree = ast.parse(source)
    text = source if isinstance(source, bytes) else source.encode("utf-8", "surrogatepass")
    found[MODULE] = [(dump(tree, ()), 1, text.count(b"\n") + 1)]
    return {
        name: Symbol(digest("\n".join(text for text, _, _ in parts)), tuple((a, b) for _, a, b in parts))
        for name, parts in found.items()
    }


def digest(text: str) -> str:
    """Return the sha256 of `text`, which may hold lone surrogates (a string literal can)."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def owner(table: dict[str, Symbol], line: int) -> str:
    """Return the innermost symbol of `table` that holds `line`."""
    holds = [
        (end - first, name) for name, s in table.items() for first, end in s.spans if first <= line <= end
    ]
    return min(holds)[1] if holds else MODULE


def changed(before: bytes, after: bytes) -> set[str]:
    """Return the names of the symbols that differ, were added, or were removed."""
    a, b = symbols(before), symbols(after)
    return {n for n in a.keys() | b.keys() if n not in a or n not in b or a[n].digest != b[n].digest}

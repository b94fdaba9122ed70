"""Which parameters a Triton kernel writes, derived from its source."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable


@functools.cache
def written_parameters(kernel: Callable) -> frozenset[str] | None:
    """Return the names of the parameters that a Triton kernel stores through.

    A parameter counts if it reaches the address of a ``store`` or ``atomic_*`` through assignments, or if it is passed
    to a function of the kernel's module that stores through it. Scalars in such an address count as well. Values loaded
    from memory do not.

    Returns:
        None if the source can't be read.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel)))
    except (OSError, TypeError, SyntaxError):
        return None
    body = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)), None)
    if body is None:
        return None
    reach = {a.arg: {a.arg} for a in body.args.posonlyargs + body.args.args + body.args.kwonlyargs}
    scope = inspect.unwrap(kernel).__globals__

    def roots(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("load", "program_id", "arange"):
            return set()
        if isinstance(node, ast.Name):
            return reach.get(node.id, set())
        return set().union(*(roots(child) for child in ast.iter_child_nodes(node)), set())

    stored: set[str] = set()
    for _ in range(3):  # repeated because a loop can carry a pointer back to an earlier line
        for node in ast.walk(body):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name):
                            reach[part.id] = reach.get(part.id, set()) | roots(node.value)
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name == "store" or name.startswith("atomic_"):
                    # descriptor.store(...), or a store function of a module under any name
                    owner = roots(node.func.value) if isinstance(node.func, ast.Attribute) else set()
                    first = node.args[:1] or [k.value for k in node.keywords[:1]]
                    stored |= owner or set().union(*map(roots, first))
                    continue
                callee = scope.get(name)
                callee = getattr(callee, "fn", callee)
                if inspect.isfunction(callee) and callee is not kernel:
                    inner = written_parameters(callee)
                    names = list(inspect.signature(callee).parameters)
                    passed: list[tuple[str | None, ast.expr]] = [*zip(names, node.args, strict=False)]
                    passed += [(k.arg, k.value) for k in node.keywords]
                    for parameter, value in passed:
                        if inner is not None and parameter in inner:
                            stored |= roots(value)
    return frozenset(stored)

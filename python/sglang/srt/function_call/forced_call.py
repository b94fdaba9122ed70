"""The schema of a tool's arguments where ``tool_choice`` forces a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import Function


def arguments_schema(function: Function, schema: dict[str, Any], forced: bool) -> dict[str, Any]:
    """Return the schema that the grammar enforces on the arguments of a tool call.

    Upstream does not constrain the arguments of a tool that is not strict. A forced call then often has
    arguments that the tool cannot take, such as ``{}`` or a number, since they are the shortest that the
    grammar allows.

    Args:
        function: the tool.
        schema: upstream's choice. It is empty for a tool that is not strict.
        forced: whether ``tool_choice`` is ``required`` or names this tool.
    Returns:
        The tool's own schema if the call is forced, otherwise `schema`.
    """
    return function.parameters or {} if forced else schema

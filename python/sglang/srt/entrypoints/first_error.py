"""Ends the validation of a list or an object in a request's body at its first wrong element.

Pydantic reports every wrong element, once per type that the element could have had. A list of 100,000 numbers in place of
messages gives millions of reports, and the HTTP process spends minutes writing them down. No other request is answered
meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import SchemaValidator

if TYPE_CHECKING:
    from fastapi.routing import APIRoute

COLLECTIONS = ("list", "set", "frozenset", "tuple", "dict")


def stop_at_first_error(route: APIRoute) -> None:
    """Make a route refuse a list or an object at its first wrong element. What the route accepts stays the same.

    Args:
        route: a route of the HTTP server. One without a body stays as it is.
    """
    if route.body_field is None:
        return
    adapter = route.body_field._type_adapter
    # Without the argument, pydantic takes the validator that each model class made of its own schema.
    adapter.validator = SchemaValidator(_fail_fast(adapter.core_schema), _use_prebuilt=False)


def _fail_fast(schema: Any) -> Any:
    """A copy of a pydantic core schema in which every collection ends at its first error."""
    if isinstance(schema, dict):
        copy = {name: _fail_fast(inner) for name, inner in schema.items()}
        return copy | {"fail_fast": True} if schema.get("type") in COLLECTIONS else copy
    if isinstance(schema, (list, tuple)):
        return type(schema)(_fail_fast(inner) for inner in schema)
    return schema

"""What is wrong with a setting's value, in words, and what would be right."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

_PLAIN = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text, in double quotes",
    "tuple_type": "must be a list of texts",
    "path_type": "must be a path, in double quotes",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "must be {} or more"),
    "less_than_equal": ("le", "must be {} or less"),
    "greater_than": ("gt", "must be more than {}"),
    "less_than": ("lt", "must be less than {}"),
}
_PATTERNS = {
    "hours": 'must be two times of day, as in "22-07"',
    "run_digest": "must be a digest: 64 of the characters 0-9 and a-f",
}
_ALTERNATIVES = {"dashboard": 'must be a port from 1 to 65535, "auto" or "off"'}


def plain_cause(error: ErrorDetails) -> str:
    """Of one finding, without the words of the library that found it."""
    name, kind = str(error["loc"][0]), error["type"]
    context: Mapping[str, Any] = error.get("ctx") or {}
    if name in _ALTERNATIVES:
        return _ALTERNATIVES[name]
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(name, "must be written otherwise")
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind in _BOUNDS:
        key, text = _BOUNDS[kind]
        return text.format(f"{context[key]:g}")
    return _PLAIN.get(kind, error["msg"].removeprefix("Value error, "))

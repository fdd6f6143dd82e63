"""What pydantic finds wrong with a value, in words for whoever wrote it."""

from collections.abc import Mapping
from typing import Any

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
    "tuple_type": "must be a list",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "path_type": "must be a path, in double quotes",
}
_DIGEST = "a digest, in the characters 0-9 and a-f"
_NAME = "a name of at most 63 of the characters a-z, 0-9 and -"
_BOUNDS = {
    "greater_than_equal": ("ge", "must be {} or more"),
    "less_than_equal": ("le", "must be {} or less"),
    "greater_than": ("gt", "must be more than {}"),
    "less_than": ("lt", "must be less than {}"),
}


def in_plain_words(item: Mapping[str, Any]) -> str:
    """Of one of a `ValidationError`'s errors."""
    kind, context = item["type"], item.get("ctx") or {}
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind == "string_pattern_mismatch":
        is_digest = "a-f]" in context["pattern"]
        return f"must be {_DIGEST if is_digest else _NAME}"
    if kind in _BOUNDS:
        key, text = _BOUNDS[kind]
        return text.format(_number(context[key]))
    return _PLAIN.get(kind, str(item["msg"]).removeprefix("Value error, "))


def _number(value: float) -> str:
    """0.000001, not 1e-06."""
    text = f"{value:g}"
    return f"{value:f}".rstrip("0") if "e-" in text else text

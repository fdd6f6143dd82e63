"""What pydantic finds wrong with a value, in words for whoever wrote it; and what to change."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_PLAIN = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a smaller whole number",
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
_PEER = 'the id of a peer, as `p2p-dtfm id` prints it, or "founder"'
_NAME = "a name of at most 63 of the characters a-z, 0-9 and -"
_BOUNDS = {
    "greater_than_equal": ("ge", "must be {} or more"),
    "less_than_equal": ("le", "must be {} or less"),
    "greater_than": ("gt", "must be more than {}"),
    "less_than": ("lt", "must be less than {}"),
}


def in_plain_words(item: Mapping[str, Any]) -> str:
    """One of a `ValidationError`'s errors in words."""
    kind, context = item["type"], item.get("ctx") or {}
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        is_peer = "HJ-NP-Z" in pattern
        return f"must be {_PEER if is_peer else _DIGEST if 'a-f]' in pattern else _NAME}"
    if kind in _BOUNDS:
        key, text = _BOUNDS[kind]
        return text.format(_number(context[key]))
    return _PLAIN.get(kind, str(item["msg"]).removeprefix("Value error, "))


def _number(value: float) -> str:
    """0.000001, not 1e-06; 1048576, not 1.04858e+06."""
    if isinstance(value, int):
        return str(value)
    text = f"{value:g}"
    return f"{value:f}".rstrip("0") if "e-" in text else text


def explained(
    item: Mapping[str, Any], values: dict[str, Any], root: type[BaseModel]
) -> tuple[str, str]:
    """(cause, fix) of one error in the `values` of a file; `root` says which keys there are."""
    path = [str(part) for part in item["loc"]]
    where = ".".join(path) or "the run spec"
    if item["type"] == "extra_forbidden":
        known = _known_keys(path[:-1], root)
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}."
        return f"unknown key {where!r}", f"{hint} Otherwise remove {where!r}."
    if item["type"] == "missing":
        return f"{where!r} is missing", f"add {where!r}"
    present = looked_up(values, path)
    now = "" if isinstance(present, dict) else f" (now {present!r})"  # its keys are many
    return f"{where}: {in_plain_words(item)}", f"change {where}{now}"


def _known_keys(path: list[str], root: type[BaseModel]) -> list[str]:
    section: Any = root
    for part in path:
        if not hasattr(section, "model_fields"):  # within a list
            return []
        section = section.model_fields[part].annotation
    if not hasattr(section, "model_fields"):
        return []
    return sorted([*section.model_fields, *(["preset"] if path == ["model"] else [])])


def looked_up(values: Any, path: list[str]) -> Any:
    """What a file says at `path`; None where it says nothing."""
    for part in path:
        if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        elif isinstance(values, dict) and part in values:
            values = values[part]
        else:
            return None
    return values

"""What is wrong with a setting's value, in words, and what would be right."""

from pydantic_core import ErrorDetails

from p2p_dtfm.core.protocol.plain_words import in_plain_words

_PATTERNS = {
    "hours": 'must be two times of day, as in "22-07"',
    "run_digest": "must be a digest: 64 of the characters 0-9 and a-f",
}
_ALTERNATIVES = {"dashboard": 'must be a port from 1 to 65535, "auto" or "off"'}


def plain_cause(error: ErrorDetails) -> str:
    """Of one finding, without the words of the library that found it."""
    name, kind = str(error["loc"][0]), error["type"]
    if name in _ALTERNATIVES:
        return _ALTERNATIVES[name]
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(name, "must be written otherwise")
    return in_plain_words(error)

"""Text from strangers on a terminal: shown as text, whatever it contains."""

import unicodedata

LIMIT_CHARACTERS = 300
SHORT_CHARACTERS = 48
_HIDDEN = ("C", "Zl", "Zp")
"""Categories of Unicode that are hidden: control characters, those that turn the direction of what
follows, line and paragraph separators."""


def plain(text: object, limit: int = LIMIT_CHARACTERS) -> str:
    """The text on one line, without what a terminal would obey, and cut if it is too long."""
    found = str(text)
    cut = f"{found[: limit - 1]}…" if len(found) > limit else found
    return "".join("�" if is_hidden(letter) else letter for letter in cut)


def is_hidden(letter: str) -> bool:
    """Whether a terminal would act on the letter, or show nothing."""
    return unicodedata.category(letter).startswith(_HIDDEN)


def harmless_lines(text: str) -> str:
    """Like `plain` for several lines of any length, such as a traceback."""
    return "".join("�" if is_hidden(letter) and letter not in "\n\t" else letter for letter in text)

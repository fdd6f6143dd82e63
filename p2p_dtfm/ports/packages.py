"""Packages that may be missing: what to type for one, wherever this program was installed."""

import shlex
import sys
from pathlib import Path

OF_PIPX = "pipx_metadata.json"
"""pipx leaves it in each environment that it makes."""


def how_to_install(package: str) -> str:
    """A line for a shell. A bare `pip` would be another environment's, or no command at all."""
    place = Path(sys.prefix)
    if (place / OF_PIPX).is_file():
        return shlex.join(("pipx", "inject", place.name, package))
    return shlex.join((sys.executable, "-m", "pip", "install", package))

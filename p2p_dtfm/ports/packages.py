"""Where this program was installed: how to install packages that are missing, and how to start
another Python like this one."""

import os
import re
import shlex
import sys
import traceback
from importlib import metadata
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError

OF_PIPX = "pipx_metadata.json"
"""A file that pipx leaves in each environment that it makes."""

OF_A_MODULE = "<module>"
"""The interpreter's name for the code that runs when a module is imported."""


def python_command(*arguments: str) -> list[str]:
    """The command that starts another Python. It imports what this one does, and nothing that
    happens to lie in the directory where it is started."""
    return [sys.executable, *([] if _is_from_here() else ["-P"]), *arguments]


def _is_from_here() -> bool:
    try:
        return sys.path[:1] in ([""], [os.getcwd()])
    except FileNotFoundError:  # the directory was removed meanwhile, and nothing lies in it
        return False


def how_to_install(package: str) -> str:
    """A shell line that installs a package. A bare `pip` could be another environment's, or no
    command at all."""
    place = Path(sys.prefix)
    if (place / OF_PIPX).is_file():
        return shlex.join(("pipx", "inject", place.name, package))
    return shlex.join((sys.executable, "-m", "pip", "install", package))


def not_loaded(error: ImportError | OSError) -> UserError:
    """The error for what an import raised: a package is missing, or lacks a part of its own."""
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    package = _needed(missing or "")
    return UserError(
        f"a package that p2p-dtfm needs cannot be loaded: {str(error).partition(chr(10))[0]}",
        (
            *((f"install it: {how_to_install(package)}",) if package else ()),
            "install p2p-dtfm anew: pipx install --force FILE.whl, with the wheel that you were "
            "given; in a clone: make environment",
        ),
        exit_code=1,  # it may pass, as where all is just being installed anew
    )


def of_an_import(error: ImportError | OSError) -> UserError | None:
    """`not_loaded` for an error that was raised while the catcher imported something. None for any
    other error, as of a disk or of too many open files. Those have an error number, while a library
    that is not whole has none."""
    if isinstance(error, OSError) and error.errno is not None:
        return None
    frames = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    if isinstance(error, ImportError) or OF_A_MODULE in frames:
        return not_loaded(error)
    return None


def _needed(module: str) -> str:
    """The package that this program requires and that has a module's name. Empty where the package
    has another name, as protobuf has for `google`."""
    try:
        needed = metadata.requires("p2p-dtfm") or ()
    except metadata.PackageNotFoundError:  # it runs from its sources alone
        needed = ()
    names = (name[0] for it in needed if (name := re.match(r"[A-Za-z0-9._-]+", it)))
    return next((name for name in names if _alike(name) == _alike(module)), "")


def _alike(name: str) -> str:
    """A package's name as installers compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()

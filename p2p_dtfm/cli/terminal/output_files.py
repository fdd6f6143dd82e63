"""Files that a command writes because somebody named them."""

from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError


def check_writable(path: Path | None, option: str) -> None:
    """Check before the work is done. Raises `UserError` if the file could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path} is a directory", "name a file in it")
    if not path.parent.is_dir():
        raise UserError(
            f"{option} {path}: there is no directory {path.parent}", "make it, or choose another"
        )


def write_text(path: Path, text: str, option: str) -> None:
    """Raises `UserError` where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}", f"choose another {option}"
        ) from error

"""Directories that `datasets.save_to_disk` wrote: which of their files hold rows."""

import json
import shlex
from pathlib import Path
from typing import Any

from p2p_dtfm.core.protocol.errors import UserError


def data_set_files(folder: Path, names: set[str]) -> set[str] | None:
    """The names of the table files among `names`, which are the entries of `folder`. None if the
    folder is no data set.

    Raises `UserError` for a data set of several splits: this program does not guess which one to
    learn.
    """
    if "dataset_dict.json" in names:
        splits = _read_json(folder / "dataset_dict.json").get("splits")
        shown = ", ".join(map(str, splits)) if isinstance(splits, list) else "unknown"
        train, held_out = (shlex.quote(str(folder / it)) for it in ("train", "validation"))
        raise UserError(
            f"{folder} holds a data set of several splits: {shown}",
            f"name them: p2p-dtfm prepare {train} --validation {held_out} --out DIR",
        )
    if not {"state.json", "dataset_info.json"} <= names:
        return None
    files = _read_json(folder / "state.json").get("_data_files")
    entries = files if isinstance(files, list) else []
    named = [entry.get("filename") for entry in entries if isinstance(entry, dict)]
    return {name for name in named if isinstance(name, str)} & names


def stated_licence(paths: list[Path]) -> str:
    """The licence of the first of these directories that is a data set and states one, or ""."""
    for path in paths:
        if (path / "dataset_info.json").is_file():
            licence = _read_json(path / "dataset_info.json").get("license")
            if isinstance(licence, str) and licence:
                return licence
    return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}", "write the data set again") from error
    return value if isinstance(value, dict) else {}

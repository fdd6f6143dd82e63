"""Finding and reading scenario files and run specs, by path or by the name of a packaged one."""

import difflib
import json
import tomllib
from pathlib import Path
from typing import Any

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.sim.scenario.scenario import Scenario, load_scenario


def packaged_configs() -> Path:
    """The directory of the configurations that come with the program."""
    inside = Path(__file__).parents[2] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "configs"


def read_scenario(name: str) -> Scenario:
    """A scenario by path or packaged name. Raises `UserError`."""
    return load_scenario(_find(name, packaged_configs() / "scenarios", "scenario"))


def find_run_spec(name: str) -> Path:
    """The file of a run spec, by path or packaged name. Raises `UserError`."""
    return _find(name, packaged_configs(), "run spec")


def read_run_spec(
    name: str | Path, layers: int | None = None, global_batch: int | None = None
) -> RunSpec:
    """A run spec by path or packaged name, with another depth or batch. Raises `UserError`."""
    path = find_run_spec(str(name))
    return parse_run_spec(read_changed(path, layers, global_batch), str(path))


def read_changed(path: Path, layers: int | None, global_batch: int | None) -> dict[str, Any]:
    """The values of a run spec's file, with another depth or batch. Raises `UserError`."""
    values = read_values(path)
    for section, key, value in (
        ("model", "layers", layers),
        ("batch", "global_batch", global_batch),
    ):
        if value is not None and isinstance(values.get(section), dict):
            values[section][key] = value
    return values


def read_values(path: Path) -> dict[str, Any]:
    """The values of a TOML (or JSON) file. Raises `UserError` naming the line that is wrong."""
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a mark in front
        is_json = kind == "JSON"
        values = json.loads(text, object_pairs_hook=_each_once) if is_json else tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(item.stem for item in packaged_configs().glob("*.toml")))
        raise UserError(
            f"cannot read the run spec {path}: {error}",
            f"give the path of a TOML file, or one of the names that come along: {known}",
        ) from error
    except (ValueError, RecursionError) as error:  # not only what the two parsers declare
        raise UserError(f"{path} is not valid {kind}: {error}", "mend that line") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no run spec", "p2p-dtfm spec tiny prints an example")
    return values


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The table of these pairs. As in TOML no key stands twice: which one was meant nobody can
    tell. Raises `ValueError`."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands twice in one table")
        found[key] = value
    return found


def _find(name: str, directory: Path, what: str) -> Path:
    path = Path(name)
    packaged = directory / f"{name}.toml"
    if path.is_file():
        return path
    if packaged.is_file():
        return packaged
    names = sorted(item.stem for item in directory.glob("*.toml"))
    fix = f"give the path of a TOML file, or one of the names that come along: {', '.join(names)}"
    if path.is_dir():
        inside = sorted(path.glob("*.toml"))
        meant = (f"did you mean {inside[0]}?",) if len(inside) == 1 else ()
        raise UserError(f"{name!r} is a directory, not a {what}", (*meant, fix))
    near = difflib.get_close_matches(path.stem, names, n=1, cutoff=0.6)
    raise UserError(
        f"there is no {what} {name!r}", (f"did you mean {near[0]}?", fix) if near else fix
    )

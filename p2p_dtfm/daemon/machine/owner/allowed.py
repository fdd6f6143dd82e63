"""What the owner of a machine allows is typed at each start. A home writes down what was typed
last. A user who leaves it out the next time is told: the daemon would take half of the cores and
another port."""

import json
import logging
import shlex
from pathlib import Path
from typing import Any

from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.ports import disk

FILE_NAME = "typed-last.json"
NAMES = (
    *("name", "listen", "announce", "device", "network", "threads", "memory_gib", "resident_gib"),
    *("uplink_mbps", "downlink_mbps", "disk_gib", "hours", "on_battery", "on_metered"),
    *("busy_percent", "nearby", "relay", "publish", "direct_lines", "port_mapping"),
    *("dashboard", "public_status", "tell_status"),
)
"""Settings that state limits, ports, and what others may see."""
FILE_LIMIT_BYTES = 1 << 16

log = logging.getLogger("p2p_dtfm")


def note_typed(home: Path, settings: Settings) -> None:
    """Write down what was typed in this home. If none of it was typed, the old stays: the same may
    be meant. If only usual values were typed, only those are taken back. A program that starts the
    daemon knows by itself what it says, so nothing is written then."""
    typed = _typed(settings)
    if not typed or settings.until_stdin_closes:
        return
    usual = _usual()
    if all(value == usual[name] for name, value in typed.items()):
        typed = {name: value for name, value in _read(home).items() if name not in typed}
    try:
        disk.write_whole(home / FILE_NAME, json.dumps(typed).encode(), disk.ONLY_OWNER)
    except OSError as error:  # `left_out` tells if this loses anything
        log.debug("cannot write down what was typed: %s", error)


def left_out(settings: Settings) -> str:
    """What was typed last in this home and is not now, as a line for its owner; or empty."""
    if settings.until_stdin_closes:
        return ""
    now = _typed(settings)
    missing = {name: value for name, value in _read(settings.home).items() if name not in now}
    if not missing:
        return ""
    options = " ".join(_as_options(name, missing[name]) for name in NAMES if name in missing)
    return (
        f"this home was started with {options} before, and not now: what is typed is not "
        "remembered; end this one and type it again, or keep it in a file (--config FILE) or a "
        "service"
    )


def _typed(settings: Settings) -> dict[str, Any]:
    """What was typed, also usual values: those may be the opposite of what was typed before."""
    values = settings.model_dump(mode="json", exclude_unset=True)
    return {name: values[name] for name in NAMES if name in values}


def _usual() -> dict[str, Any]:
    return Settings(home=Path("/")).model_dump(mode="json")  # the user's own home may not be known


def _read(home: Path) -> dict[str, Any]:
    """What was typed last, as far as it is valid. An older file, or a torn one, says less."""
    try:
        with (home / FILE_NAME).open("rb") as file:
            told = json.loads(file.read(FILE_LIMIT_BYTES))
        known = {name: told[name] for name in NAMES if name in told}
        values = Settings.model_validate({"home": Path("/"), **known}).model_dump(mode="json")
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    usual = _usual()
    return {name: values[name] for name in known if values[name] != usual[name]}


def _as_options(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    each = value if isinstance(value, list) else [value]
    return " ".join(f"--{option} {shlex.quote(_in_short(it))}" for it in each)


def _in_short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

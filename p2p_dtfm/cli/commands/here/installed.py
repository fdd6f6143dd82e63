"""Where this user's service lies, and which home belongs to it."""

import os
import tomllib
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.home import Home, default_home, expanded

UNIT = "p2p-dtfm.service"


def places() -> tuple[Path, Path]:
    """The paths of the unit and of its settings."""
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or expanded(Path("~/.config")))
    return configuration / "systemd/user" / UNIT, configuration / "p2p-dtfm/service.toml"


def is_of_service(home: Path | None) -> bool:
    """Whether a service is installed that starts the daemon of this home again."""
    try:
        unit, settings = places()
        if not unit.exists():
            return False
        named = tomllib.loads(settings.read_text(encoding="utf-8")).get("home")
        own = Home(Path(named) if named else default_home())
        return own.root == Home(home or default_home()).root
    except (OSError, ValueError, TypeError, UserError):  # some users have no directory
        return False

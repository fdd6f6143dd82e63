"""How long something takes, in words."""

import re

from p2p_dtfm.core.protocol.errors import UserError

_PARTS = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?")
_SECONDS = (86_400, 3600, 60, 1)


def seconds_of(text: str, option: str = "--for") -> int:
    """Seconds of "2h", "1h30m", "45m" or "3d", given after `option`. Raises `UserError`."""
    found = _PARTS.fullmatch(text.strip().lower().replace(" ", ""))
    groups = found.groups() if found is not None else ()
    total = sum(int(it or 0) * unit for it, unit in zip(groups, _SECONDS, strict=False))
    if not total:
        raise UserError(
            f"{text[:40]!r} is no length of time", f"write it as 45m, 2h, 1h30m or 3d: {option} 2h"
        )
    return total

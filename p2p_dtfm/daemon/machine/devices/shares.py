"""Which devices a setting names, and what the daemon of each is told. What the user lets the whole
machine use is divided among them."""

import os
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.home import DEVICES
from p2p_dtfm.daemon.machine.settings import PREFIX, Settings
from p2p_dtfm.ports.granted import offered_bytes
from p2p_dtfm.ports.packages import python_command

ALL = "all"
DEVICES_LIMIT = 64
ONE_DEVICE = r"cpu|cuda:\d+|emulated:.+"
NAME_LIMIT = 24
PORTS_OF_EACH = 2
"""The port that is listened on, and the one above it for direct lines."""
LIST_LIMIT_S = 120.0
"""A driver that hangs does so for ever. To load torch from a slow disk takes a minute."""
_LIST_DEVICES = """
import torch
print(*(f"cuda:{number}" for number in range(torch.cuda.device_count())))
"""


def is_several(device: str) -> bool:
    """Whether this setting names more than one daemon computes with."""
    return device.strip().lower() == ALL or "," in device


def devices_of(setting: str) -> tuple[str, ...]:
    """The devices of a setting. "all" means every accelerator, or the processor where there is
    none. Else they are as listed, and the processor may be listed repeatedly. Raises
    `UserError`."""
    if setting.strip().lower() == ALL:
        return _accelerators() or ("cpu",)
    devices = tuple(each.strip().lower() for each in setting.split(","))
    fix = 'separate devices by commas, as in "cuda:0,cuda:1", or use "all"'
    wrong = [each for each in devices if not re.fullmatch(ONE_DEVICE, each)]
    if wrong or len(devices) > DEVICES_LIMIT:
        raise UserError(f"{setting!r} is no list of devices", fix)
    twice = {each for each in devices if each.startswith("cuda") and devices.count(each) > 1}
    if twice:
        raise UserError(f"{sorted(twice)[0]} is listed twice, and has one daemon", fix)
    return devices


def _accelerators() -> tuple[str, ...]:
    """The accelerators, looked for in another process: torch would stay in this one."""
    command = python_command("-c", _LIST_DEVICES)
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIST_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"this machine does not say which accelerators it has within {LIST_LIMIT_S:.0f} s",
            (
                "see whether its driver answers: nvidia-smi",
                'name the devices, as in --device "cuda:0,cuda:1"',
            ),
        ) from error
    return tuple(listed.stdout.split())


def threads_of_each(threads: int, devices: int) -> int:
    """Each daemon's part of the machine's threads; 0: as many as torch likes."""
    return max(1, threads // devices) if threads else 0


def shares_of(settings: Settings, devices: Sequence[str], free_bytes: int) -> list[Settings]:
    """What each daemon is told. `free_bytes`: free memory of the machine. If some daemons have
    cards, only half of it goes to those on processors."""
    processors = devices.count("cpu")
    shares = []
    for number, device in enumerate(devices):
        count = len(devices)
        changes: dict[str, Any] = {"device": device, "until_stdin_closes": True}
        changes["threads"] = threads_of_each(settings.compute_threads, count)
        for limit in ("resident_gib", "uplink_mbps", "downlink_mbps", "disk_gib"):
            changes[limit] = getattr(settings, limit) / count
        if device == "cpu":
            offered_gib = offered_bytes(free_bytes if processors == count else free_bytes // 2)
            changes["memory_gib"] = (settings.memory_gib or offered_gib / (1 << 30)) / processors
        changes |= _as_first(settings, count) if number == 0 else _as_another(settings, number)
        shares.append(settings.model_copy(update=changes))
    return shares


def _as_first(settings: Settings, count: int) -> dict[str, Any]:
    """Settings of the first daemon. If it founds, it waits at least for those of its own
    machine."""
    return {"expect_peers": max(settings.expect_peers, count)}


def _as_another(settings: Settings, number: int) -> dict[str, Any]:
    name = f"{settings.name}-{number + 1}" if settings.name else ""
    changes: dict[str, Any] = {
        "home": settings.home / DEVICES / str(number + 1),
        "name": name if len(name) <= NAME_LIMIT else "",
        "run": "",
        "new": False,
        "public_status": 0,
        "tell_status": False,
        "webhook": "",
        "notify": False,
        "expect_peers": 1,
        "listen": tuple(_port_beside(address, number) for address in settings.listen),
        "announce": tuple(_port_beside(address, number) for address in settings.announce),
    }
    if isinstance(settings.dashboard, int):
        changes["dashboard"] = "auto"
    if settings.tensorboard is not None:
        changes["tensorboard"] = settings.tensorboard / f"device-{number + 1}"
    return changes


def _port_beside(address: str, number: int) -> str:
    """The port for a further device, two above the one before. A port that the system chooses stays
    so."""

    def further(found: re.Match[str]) -> str:
        port = int(found[1])
        return f"/tcp/{port + PORTS_OF_EACH * number if port else 0}"

    return re.sub(r"/tcp/(\d+)", further, address, count=1)


def environment_of(settings: Settings) -> dict[str, str]:
    """This process's environment with the settings in it. All users of a machine may see what is
    typed, and an invitation is a secret."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    values = settings.model_dump(mode="json")
    for name, field in Settings.model_fields.items():
        value = values[name]
        if name != "home" and getattr(settings, name) == field.default:  # some users have no home
            continue
        kept[PREFIX + name.upper()] = " ".join(value) if isinstance(value, list) else str(value)
    return kept

"""What this machine's owner may need it for: its battery, its line, its processors and devices."""

import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import psutil

ASK_LIMIT_S = 5.0
OURS = frozenset({"p2p-dtfm", "p2p_dtfm", "p2pd"})
"""A process with one of these in its command line, in a path or before the dots of a module, is not
the owner's program."""
SUPPLIES = Path("/sys/class/power_supply")
LINES = ("Mains", "USB", "Wireless")
BATTERIES = ("Battery", "UPS")
"""Kinds of power supplies, as the kernel names them."""
NETWORK_MANAGER = "org.freedesktop.NetworkManager"
ASK_METERED = (
    *("busctl", "--system", "get-property", NETWORK_MANAGER),
    *("/org/freedesktop/NetworkManager", NETWORK_MANAGER, "Metered"),
)
METERED = frozenset({"1", "3"})
"""NetworkManager's NMMetered: yes, and guessed yes."""
ASK_DEVICES = ("nvidia-smi", "pmon", "-c", "1", "-s", "u")

Ask = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class OwnerSight:
    """What was seen at one moment."""

    on_battery: bool = False
    is_metered: bool = False
    busy_share: float = 0.0
    """Share of the processors, or of a device, that other programs use: the greater. 0 to 1."""


def answer_of(command: Sequence[str]) -> str:
    """What a program of the system prints. Empty where it is missing, fails or takes long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ASK_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def on_battery(supplies: Path = SUPPLIES) -> bool:
    """Whether a battery is emptied and no line feeds the computer. False where there is none, or
    where nobody can tell. The battery of a mouse or keyboard feeds something else."""
    is_emptied = False
    for supply in supplies.glob("*"):
        kind = _word(supply / "type")
        if _word(supply / "scope") == "Device":
            continue
        if kind in LINES and _word(supply / "online") not in ("", "0"):
            return False
        is_emptied |= kind in BATTERIES and _word(supply / "status") == "Discharging"
    return is_emptied


def _word(path: Path) -> str:
    """What a supply's file says; empty where it says nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # such as a port with nothing connected
        return ""


def is_metered(ask: Ask = answer_of) -> bool:
    """Whether the line in use is metered, as NetworkManager knows or guesses it."""
    return ask(ASK_METERED).split()[1:2] in [[value] for value in METERED]


def devices_busy_share(ask: Ask = answer_of, is_ours: Callable[[int], bool] | None = None) -> float:
    """Share of the busiest NVIDIA device that others' processes use, 0 to 1. 0 where there is
    none."""
    is_ours = is_ours or _is_ours_by_id
    shares: dict[str, float] = {}
    columns: list[str] = []
    for line in ask(ASK_DEVICES).splitlines():
        cells = line.lstrip("# ").split()
        if line.startswith("#"):
            columns = cells if "pid" in cells else columns
            continue
        row = dict(zip(columns, cells, strict=False))
        pid, used = row.get("pid", ""), row.get("sm", "")
        if pid.isdecimal() and used.isdecimal() and not is_ours(int(pid)):
            shares[row["gpu"]] = shares.get(row["gpu"], 0.0) + int(used) / 100
    return min(1.0, max(shares.values(), default=0.0))


def is_ours(command: Iterable[str]) -> bool:
    """Whether a command line is that of this program, or of what it starts."""
    return any(part.split(".")[0] in OURS for word in command for part in PurePath(word).parts)


def _is_ours_by_id(pid: int) -> bool:
    try:
        return is_ours(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return False


class ProcessorUse:
    """How much other programs use of all processors, from one look to the next."""

    def __init__(self) -> None:
        self._before: tuple[float, float, dict[int, float]] | None = None

    def share(self) -> float:
        """Their share, 0 to 1; 0 at the first look. Processes that came and went count as
        others'."""
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        all_s = sum(times[:8])  # guests' time, behind these, is in user's already
        ours_s = _own_times()
        before, self._before = self._before, (all_s, idle_s, ours_s)
        if before is None or all_s <= before[0]:
            return 0.0
        busy_s = (all_s - before[0]) - (idle_s - before[1])
        own_s = sum(now_s - before[2].get(pid, now_s) for pid, now_s in ours_s.items())
        return min(1.0, max(0.0, (busy_s - own_s) / (all_s - before[0])))


def _own_times() -> dict[int, float]:
    """Processor seconds of each of this program's processes on this machine, by its id."""
    found = {}
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None and is_ours(process.info["cmdline"] or ()):
            found[process.pid] = times.user + times.system
    return found

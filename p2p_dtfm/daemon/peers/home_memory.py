"""What a home remembers of a run: its spec, the members met there, and where they were.

It is two small files in the run's directory, written by turns at each takeover and once a minute,
each whole or not at all. If a disk breaks its promise as the machine stops, the file before is
still there. With it a daemon that comes back finds its swarm through any member that still lives.
"""

import contextlib
import logging
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.net.contacts.addresses import is_address, peer_ids_of, ways_to, whole
from p2p_dtfm.net.directory.values import open_run
from p2p_dtfm.ports import disk

FILE_NAME = "memory.json"
OTHER_NAME = "memory-before.json"
NAMES = (FILE_NAME, OTHER_NAME)
ACQUAINTANCES_LIMIT = 48
ADDRESSES_LIMIT = 8
MEETING_POINTS_LIMIT = 8
FILE_LIMIT_BYTES = 4 << 20
RUNS_LIMIT = 256
MACHINE_ID = Path("/etc/machine-id")
CONTAINER_MARKS = (Path("/run/.containerenv"), Path("/.dockerenv"))

_DAMAGES = (msgspec.DecodeError, PeerFault, ValueError, RecursionError)

log = logging.getLogger("p2p_dtfm")


class Acquaintance(msgspec.Struct, frozen=True):
    """A member that was met, and where. Each address ends in its id."""

    peer_id: str
    addresses: tuple[str, ...]
    seen_s: int
    """Unix time when it was last in a view with this peer."""


class Memory(msgspec.Struct, frozen=True):
    """What is remembered of one run."""

    signed_spec: Signed
    used_s: int
    """Unix time when this home last took part. It is later than in all runs before, whatever the
    clock said then."""
    machine: str
    """The hashed machine on which that was."""
    members: tuple[Acquaintance, ...] = ()
    """Members, those seen last first."""
    meeting_points: tuple[str, ...] = ()
    """Given addresses that answered. A bootstrap node may be among them."""
    written: int = 0
    """How often the memory was written. The wall clock, which may be set, is no order."""

    @property
    def run_digest(self) -> str:
        return digest_bytes(self.signed_spec.payload)

    @property
    def spec(self) -> RunSpec:
        return RunSpec.from_canonical_bytes(self.signed_spec.payload)

    def met(self, seen: Iterable[Acquaintance]) -> "Memory":
        """This memory, with these members seen more lately than all others."""
        newest = {item.peer_id: item for item in seen if item.addresses}
        older = (item for item in self.members if item.peer_id not in newest)
        members = (*newest.values(), *older)[:ACQUAINTANCES_LIMIT]
        return msgspec.structs.replace(self, members=members)

    def has_met(self, peer_ids: Iterable[str]) -> bool:
        """Whether one of these was a member, or answered when it was given."""
        known = {item.peer_id for item in self.members} | {*peer_ids_of(self.meeting_points)}
        return not known.isdisjoint(peer_ids)

    def addresses(self) -> tuple[str, ...]:
        """Where to look: the meeting points, then one address of each member, newest first."""
        first = (address for item in self.members for address in item.addresses[:1])
        return tuple(dict.fromkeys((*self.meeting_points, *first)))


def acquaintance(peer_id: str, addresses: Sequence[str], seen_s: int) -> Acquaintance:
    """A member with those of its addresses at which it could be called, whole and bounded."""
    ways = dict.fromkeys(whole(at, peer_id) for at in ways_to(peer_id, addresses))
    return Acquaintance(peer_id, tuple(ways)[:ADDRESSES_LIMIT], seen_s)


def read_memory(directory: Path) -> Memory | None:
    """What is remembered in a run's directory: the newest whole file."""
    found = [it for name in NAMES if (it := _read(directory / name, directory.name)) is not None]
    return max(found, key=lambda memory: memory.written, default=None)


def _read(path: Path, run: str) -> Memory | None:
    """A file's memory; None without one. A damaged file is told of once, and set aside."""
    try:
        return _whole(path, run)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cannot read %s: %s", path, error.strerror)
        return None
    except _OfAnotherVersion as error:
        log.warning(
            "run %s was last trained here by a newer p2p-dtfm than this one, which cannot read its "
            "run spec (%s): update this program, or name another --home",
            run,
            error,
        )
        return None
    except _DAMAGES as error:
        aside = path.with_suffix(".damaged")
        log.warning("what was remembered is damaged (%s): set aside as %s", error, aside)
        with contextlib.suppress(OSError):
            path.replace(aside)
        return None


def _whole(path: Path, run: str) -> Memory:
    """A file's memory. Raises what a file can be at fault with."""
    with path.open("rb") as file:
        data = file.read(FILE_LIMIT_BYTES + 1)
    return _checked(data, run)


def _checked(data: bytes, name: str) -> Memory:
    if len(data) > FILE_LIMIT_BYTES:
        raise ValueError(f"more than {FILE_LIMIT_BYTES} bytes")
    memory = msgspec.json.decode(data, type=Memory)
    digest = memory.run_digest
    if digest[: len(name)] != name:
        raise ValueError(f"it is of run {digest[:16]}")
    open_run(memory.signed_spec, digest)
    _require_known(memory.signed_spec.payload)
    read = map(_with_sound_ways, memory.members[:ACQUAINTANCES_LIMIT])
    members = [item for item in read if item.addresses]
    points = tuple(filter(is_address, memory.meeting_points[:MEETING_POINTS_LIMIT]))
    return msgspec.structs.replace(memory, members=tuple(members), meeting_points=points)


class _OfAnotherVersion(Exception):
    """The signed spec is whole, and says what this program does not know."""


def _require_known(payload: bytes) -> None:
    try:
        RunSpec.from_canonical_bytes(payload)
    except PeerFault as fault:
        raise _OfAnotherVersion(fault.cause.splitlines()[0]) from fault


def _with_sound_ways(item: Acquaintance) -> Acquaintance:
    """The member without what is no address. An earlier version wrote down whatever its members
    said of themselves; the rest holds."""
    suffix = f"/p2p/{item.peer_id}"
    sound = (at for at in item.addresses if at.endswith(suffix) and is_address(at))
    return msgspec.structs.replace(item, addresses=tuple(sound))


def write_memory(directory: Path, memory: Memory) -> None:
    """Write a memory, whole or not at all, for this user's eyes only. Raises `OSError`."""
    path = directory / NAMES[memory.written % len(NAMES)]
    data = msgspec.json.format(msgspec.json.encode(memory), indent=1)
    disk.write_whole(path, data, disk.ONLY_OWNER)


def remembered_runs(
    home: Path, read: Callable[[Path], Memory | None] = read_memory
) -> list[Memory]:
    """All runs that a home remembers. The one used last comes first."""
    directories = sorted(home.glob("runs/*/"), key=_written_s, reverse=True)[:RUNS_LIMIT]
    found = [memory for path in directories if (memory := read(path)) is not None]
    return sorted(found, key=lambda memory: memory.used_s, reverse=True)


def seen_by_others(directory: Path) -> Memory | None:
    """As `read_memory`, for a program that only looks at a home. It logs nothing, and leaves
    damaged files where they are."""
    found = []
    for name in NAMES:
        with contextlib.suppress(OSError, _OfAnotherVersion, *_DAMAGES):
            found.append(_whole(directory / name, directory.name))
    return max(found, key=lambda memory: memory.written, default=None)


def _written_s(directory: Path) -> float:
    """Roughly when the memory was last written there; 0 where none was."""
    times_s = []
    for name in NAMES:
        with contextlib.suppress(OSError):
            times_s.append((directory / name).stat().st_mtime)
    return max(times_s, default=0.0)


def this_machine() -> str:
    """A name for this machine that says nothing of it. A container has another host name each time
    that it is made, so the host name is left out there."""
    try:
        own = MACHINE_ID.read_bytes()
    except OSError:
        in_container = any(mark.exists() for mark in CONTAINER_MARKS)
        own = b"" if in_container else platform.node().encode()
    return digest_bytes(b"p2p-dtfm machine " + own.strip())[:16]

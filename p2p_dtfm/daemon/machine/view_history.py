"""The views that this peer was in, on its disk. By them it knows its swarm again. The file also
says who was convicted in them, so that a restart of all members forgives nobody."""

import logging
import threading
from pathlib import Path

import msgspec

from p2p_dtfm.core.consensus.views.reminders import Signatures
from p2p_dtfm.core.messages.agreement_messages import KnownView
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import Bar
from p2p_dtfm.daemon.machine.home import place_of_run
from p2p_dtfm.ports import disk

log = logging.getLogger("p2p_dtfm")

FILE_NAME = "views.msgpack"
LIMIT_BYTES = 16 << 20


class ViewsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's content."""

    run_digest: str
    views: tuple[KnownView, ...]
    bars: tuple[Bar, ...] = ()
    signatures: tuple[Signatures, ...] = ()


class ViewHistory:
    """One file in a home for each run that the peer took part in. A peer that comes back to one
    after another still knows it."""

    def __init__(self, home: Path, run_digest: str) -> None:
        self._path = place_of_run(home, run_digest) / FILE_NAME
        self._before = home / FILE_NAME
        """Where earlier programs kept the file, of the last run only."""
        self._run_digest = run_digest
        self._lock = threading.Lock()
        self._newest = ViewsFile(run_digest, ())

    def read(self) -> tuple[KnownView, ...]:
        """The views. Empty where there is no file, or one of another run or version."""
        return self._read().views

    def read_bars(self) -> tuple[Bar, ...]:
        """Bars of peers that were convicted while this peer took part."""
        return self._read().bars

    def read_signatures(self) -> tuple[Signatures, ...]:
        """Signatures by which others can be reminded of these views, should they have lost their
        disks."""
        return self._read().signatures

    def _read(self) -> ViewsFile:
        for path in (self._path, self._before):
            try:
                file = decode(path.read_bytes(), ViewsFile, LIMIT_BYTES)
            except (OSError, PeerFault):
                continue
            if file.run_digest == self._run_digest:
                return file
        return ViewsFile(self._run_digest, ())

    def keep(
        self,
        views: tuple[KnownView, ...],
        bars: tuple[Bar, ...] = (),
        signatures: tuple[Signatures, ...] = (),
    ) -> None:
        """Keep these as the newest, for `write`."""
        self._newest = ViewsFile(self._run_digest, views, bars, signatures)

    def write(self) -> None:
        """Write the newest. So it does not matter which of two threads comes first. A history that
        cannot be written costs nothing now, so training goes on."""
        with self._lock:
            self._write(self._newest)

    def _write(self, file: ViewsFile) -> None:
        try:
            payload = encode(file)
            for made in (self._path.parent.parent, self._path.parent):
                made.mkdir(exist_ok=True)  # no home: it may have been moved away
            disk.write_whole(self._path, payload, disk.ONLY_OWNER)
            disk.sync_directory(self._path.parent)  # else a power cut forgives a peer just barred
        except OSError as error:
            log.warning("the views of this run cannot be written down: %s", error)

"""The views that this peer was in, on its disk: by them it knows its swarm again."""

import logging
import threading
from pathlib import Path

import msgspec

from p2p_dtfm.core.messages.agreement_messages import KnownView
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.ports import disk

log = logging.getLogger("p2p_dtfm")

LIMIT_BYTES = 16 << 20


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run_digest: str
    views: tuple[KnownView, ...]


class ViewHistory:
    """One file in the home, of the run that the peer took part in last."""

    def __init__(self, directory: Path, run_digest: str) -> None:
        self._path = directory / "views.msgpack"
        self._run_digest = run_digest
        self._lock = threading.Lock()
        self._newest: tuple[KnownView, ...] = ()

    def read(self) -> tuple[KnownView, ...]:
        """Nothing where there is no file, or one of another run or version."""
        try:
            file = decode(self._path.read_bytes(), _File, LIMIT_BYTES)
        except (OSError, PeerFault):
            return ()
        return file.views if file.run_digest == self._run_digest else ()

    def keep(self, views: tuple[KnownView, ...]) -> None:
        """They are the newest: `write` writes them."""
        self._newest = views

    def write(self) -> None:
        """The newest, so of two threads it does not matter which comes first. A history that cannot
        be kept costs nothing now, so training goes on."""
        with self._lock:
            self._write(self._newest)

    def _write(self, views: tuple[KnownView, ...]) -> None:
        try:
            payload = encode(_File(self._run_digest, views))
            disk.write_whole(self._path, payload, disk.ONLY_OWNER)
        except OSError as error:
            log.warning("the views of this run cannot be written down: %s", error)

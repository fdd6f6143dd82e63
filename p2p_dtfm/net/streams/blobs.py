"""Files by the digest of their content, from whichever peers have them."""

import asyncio
import collections
import contextlib
import io
import logging
import os
import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.blob_files import read_part, settle
from p2p_dtfm.net.door import BUSY
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.hashers import NewHasher, blake2b_of_blobs, digest_of
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.net.streams.donors import (
    CHUNK_DEADLINE_S,
    CHUNK_LIMIT_BYTES,
    DonorPatience,
    Donors,
    DonorTurn,
    DonorTurns,
    TooSlow,
)
from p2p_dtfm.ports import disk, now

OpenBlob = Callable[[str], Path | bytes | memoryview | None]
"""Finds a blob, on disk or in memory, by its digest."""
MayHave = Callable[[str, str], None]
"""Raises `PeerFault` for a sender that does not get the blob with this digest."""
Unread = Callable[[str], Callable[[], bool] | None]
"""What a thread has to do before a file may be given, saying whether the file is what it is called;
None: nothing. A disk may have lost what was written to it, and everybody that is given the remains
calls the giver a liar."""
OnFault = Callable[[str, PeerFault], None]
OnProgress = Callable[[str, int, int], None]
"""Digest, bytes that are here, bytes in all. The end, good or not, is told as (digest, 0, 0)."""
OnCame = Callable[[int], None]
"""Told how many more bytes are here."""

CALLS_IN_FLIGHT = 4
BUSY_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)
BEGUN_LIMIT_BYTES = 256 << 20
"""Most bytes kept of downloads that broke off: a peer with the rest may be found later."""
CROWD = 3
"""From this many peers on, they are asked first which of them has the blob at all."""
ASKED_AT_ONCE = 16
ASK_DEADLINE_S = 3.0
PEERS_REMEMBERED = 4096
GIVES_S = 15.0
"""How long at most a given chunk is on its way: a line carries a chunk in a few seconds."""
_DIGEST = re.compile("[0-9a-f]{64}")

log = logging.getLogger(__name__)


class BlobUnavailable(Exception):
    """No peer that was asked has given the blob."""

    def __init__(self, digest: str, causes: dict[str, str], denied: Collection[str] = ()) -> None:
        """`denied`: peers that have answered, but without the blob."""
        self.digest = digest
        self.causes = causes
        self.denied = frozenset(denied)
        tried = "; ".join(f"{peer_id}: {cause}" for peer_id, cause in causes.items())
        super().__init__(f"blob {digest} could not be fetched ({tried or 'no peer to ask'})")


class _Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    digest: str
    offset: int
    length: int


class _Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    total_bytes: int
    content: bytes


class _Call(NamedTuple):
    """A request for a chunk that is under way."""

    task: asyncio.Task[_Chunk]
    asked_s: float
    length: int


class _Download:
    """How far a blob has come, and from whom."""

    def __init__(
        self, file: BinaryIO, digest: str, max_bytes: int, hasher: NewHasher = blake2b_of_blobs
    ) -> None:
        self.digest = digest
        self.name = digest, hasher
        self.max_bytes = max_bytes
        self.causes: dict[str, str] = {}
        """What went wrong, by peer."""
        self.denied: set[str] = set()
        """Those in `causes` that have answered: neither their link nor being busy is the cause."""
        self.offset = 0
        self.total: int | None = None
        self.donors: list[str] = []
        self.on_came: OnCame | None = None
        self._file = file
        self._hasher = hasher

    @property
    def has_begun(self) -> bool:
        return self.offset > 0

    async def keep(self, chunk: _Chunk) -> None:
        if isinstance(self._file, io.BytesIO):  # a cancelled call may be continued
            self._file.write(chunk.content)
        else:
            await asyncio.to_thread(disk.write, self._file, chunk.content)
        self.offset += len(chunk.content)
        if self.on_came is not None:
            self.on_came(len(chunk.content))

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self.offset, self.total, self.donors = 0, None, []

    async def is_right(self) -> bool:
        """Whether what has come has the digest."""
        file = self._file
        if isinstance(file, io.BytesIO):  # no copy, and whoever continues waits for no thread
            file = io.BytesIO(file.getvalue())
        file.seek(0)
        return await asyncio.to_thread(digest_of, file, self._hasher()) == self.digest


class BlobExchange:
    """Serves what `open_blob(digest)` finds, and fetches from others. `await ready()` to serve."""

    def __init__(
        self,
        host: HostPort,
        open_blob: OpenBlob,
        on_fault: OnFault | None = None,
        on_progress: OnProgress = lambda digest, done_bytes, total_bytes: None,
        may_have: MayHave = lambda sender, digest: None,
        unread: Unread = lambda digest: None,
    ) -> None:
        self._open_blob = open_blob
        self._may_have = may_have
        self._unread = unread
        self._reads = asyncio.Lock()
        self._on_fault = on_fault
        self._on_progress = on_progress
        self.received_bytes = 0
        """Bytes in all of the chunks that were asked for."""
        self.given_bytes: collections.Counter[str] = collections.Counter()
        """Bytes given to each peer that asked lately."""
        self._gave_at_s: dict[str, float] = {}
        self._begun: dict[tuple[str, NewHasher], tuple[_Download, io.BytesIO]] = {}
        """Downloads that broke off, by digest and hash function: whoever names a blob chooses its
        digits."""
        self._donors = Donors()
        self._plane = ControlPlane(host, self._serve, name="blob")

    async def ready(self) -> "BlobExchange":
        """Start to serve."""
        await self._plane.ready()
        return self

    async def fetch(self, digest: str, peers: Sequence[str], target: Path, max_bytes: int) -> Path:
        """Fetch the blob into `target`, which appears whole and verified or not at all.

        Peers are asked in turn. After one that fails or is slow, the next goes on at the same
        offset. A slow one may be asked again (`net.streams.donors`). A donor of wrong bytes is
        reported to `on_fault`. Raises `BlobUnavailable`, and `OSError` for a disk that does not
        take the blob.
        """
        target.parent.mkdir(exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with open(descriptor, "w+b") as file:
                await self._complete(_Download(file, digest, max_bytes), peers)
                await asyncio.to_thread(settle, file)
            disk.name(Path(temporary), target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        return target

    async def fetch_bytes(
        self,
        digest: str,
        peers: Sequence[str],
        max_bytes: int,
        hasher: NewHasher = blake2b_of_blobs,
        on_came: OnCame | None = None,
    ) -> bytes:
        """As `fetch`, for a blob that is not to lie on disk, and may be named by another digest of
        256 bits. If nobody can give the rest, or the call is cancelled, the bytes that have come
        are kept for the next call. `on_came` is told of what comes."""
        file = io.BytesIO()
        download = _Download(file, digest, max_bytes, hasher)
        if download.name in self._begun:
            download, file = self._begun.pop(download.name)
            download.max_bytes, download.causes, download.denied = max_bytes, {}, set()
        download.on_came = on_came
        try:
            await self._complete(download, peers)
        except BaseException as error:
            self._set_aside(download, file, kept=int(isinstance(error, BlobUnavailable)))
            raise
        return file.getvalue()

    def gave_lately(self, peer_id: str) -> bool:
        """Whether the peer was given a chunk that may still be on its way, as far as this end
        sees."""
        gave_at_s = self._gave_at_s.get(peer_id)
        return gave_at_s is not None and now.monotonic_s() - gave_at_s < GIVES_S

    def _set_aside(self, download: _Download, file: io.BytesIO, kept: int) -> None:
        """Keep what has come of a download. The last `kept` downloads stay however large, because
        most often the caller continues at once."""
        if download.has_begun:
            self._begun[download.name] = (download, file)
        begun = self._begun
        while len(begun) > kept and sum(it.offset for it, _ in begun.values()) > BEGUN_LIMIT_BYTES:
            del begun[next(iter(begun))]

    async def _complete(self, download: _Download, peers: Sequence[str]) -> None:
        """Raises `BlobUnavailable`."""
        assert _DIGEST.fullmatch(download.digest), download.digest
        try:
            if len(peers) >= CROWD:
                peers = await self._who_may_have(download, peers)
            if not await self._download_right(download, peers):
                raise BlobUnavailable(download.digest, download.causes, download.denied)
        finally:
            self._on_progress(download.digest, 0, 0)

    async def _who_may_have(self, download: _Download, peers: Sequence[str]) -> list[str]:
        """Ask the first of many peers for one byte, all at once, and put those that have the blob
        first. A single one that has it gets the time that its line takes, since nobody is better. A
        chunk that is broken off too early would be on its line twice."""
        asked, rest = peers[:ASKED_AT_ONCE], peers[ASKED_AT_ONCE:]
        answers = await asyncio.gather(*(self._has(peer, download) for peer in asked))
        have = [peer for peer, has in zip(asked, answers, strict=True) if has]
        unknown = [peer for peer, has in zip(asked, answers, strict=True) if has is None]
        return [*have, *unknown, *rest]

    async def _has(self, peer: str, download: _Download) -> bool | None:
        """Whether the peer has the blob; None where it has not said."""
        request = encode(_Request(download.digest, 0, 1))
        try:
            await self._plane.call(peer, request, ASK_DEADLINE_S)
        except Unreachable:
            return None
        except PeerFault as error:
            if error.cause == BUSY:
                return None
            download.causes[peer] = error.cause
            download.denied.add(peer)
            return False
        return True

    async def _download_right(self, download: _Download, peers: Sequence[str]) -> bool:
        """Try all donors together. If the result has the wrong digest, try each of them by
        itself."""
        if not await self._download(download, peers):
            return False
        if await download.is_right():
            return True
        donors = list(dict.fromkeys(download.donors))
        if len(donors) == 1:
            self._report(donors[0], download)
        suspects = donors if len(donors) > 1 else []
        rest = [peer for peer in peers if peer not in donors and peer not in download.causes]
        for peer in [*suspects, *rest]:
            download.restart()
            if not await self._download(download, [peer]):
                continue
            if await download.is_right():
                return True
            self._report(peer, download)
        download.restart()
        return False

    def _report(self, peer_id: str, download: _Download) -> None:
        download.causes[peer_id] = "sent bytes that do not have this digest"
        download.denied.add(peer_id)
        fault = PeerFault(f"sent wrong bytes for blob {download.digest[:12]}", peer_id)
        log.warning("%s", fault)
        if self._on_fault is not None:
            self._on_fault(peer_id, fault)

    async def _download(self, download: _Download, peers: Sequence[str]) -> bool:
        """Continue the download where it stands, and say whether it came to its end."""
        turns = DonorTurns(self._donors, peers)
        while (following := turns.next()) is not None:
            peer, patience = following
            try:
                await self._continue(download, peer, patience)
            except TooSlow as error:
                log.debug("%s is left for others: %s", peer, error)
                if not turns.note_late(peer, error):
                    download.causes[peer] = str(error)
            except (Unreachable, PeerFault) as error:
                download.causes[peer] = error.cause
                if isinstance(error, PeerFault) and error.cause != BUSY:
                    download.denied.add(peer)
                if not isinstance(error, Refused | Unreachable) and self._on_fault is not None:
                    self._on_fault(peer, PeerFault(error.cause, peer))
            else:
                return True
        return False

    async def _continue(self, download: _Download, peer: str, patience: DonorPatience) -> None:
        """Continue with one donor. Raises `TooSlow` where the donor takes more patience."""
        turn = self._donors.turn(peer, patience)
        try:
            await self._take(download, peer, turn)
        except TooSlow:
            self._donors.note_late(peer, turn)
            raise
        self._donors.note_in_time(peer, turn)

    async def _take(self, download: _Download, peer: str, turn: DonorTurn) -> None:
        """Fetch from one peer what is missing, several chunks at once, and keep what came."""
        first = await self._in_time(turn, self._begin(peer, download, turn))
        if download.total not in (None, first.total_bytes):
            download.restart()  # the donors speak of different files: trust neither's half
            first = await self._in_time(turn, self._begin(peer, download, turn))
        download.total = first.total_bytes
        download.donors.append(peer)
        await download.keep(first)
        self._on_progress(download.digest, download.offset, first.total_bytes)
        calls: collections.deque[_Call] = collections.deque()
        asked = download.offset
        try:
            while download.offset < first.total_bytes:
                while len(calls) < CALLS_IN_FLIGHT and asked < first.total_bytes:
                    calls.append(self._call(peer, download, asked, turn.length_bytes))
                    asked += calls[-1].length
                await download.keep(await self._in_time(turn, calls[0]))
                calls.popleft()
                self._on_progress(download.digest, download.offset, first.total_bytes)
        finally:
            for call in calls:
                call.task.cancel()
            await asyncio.gather(*(call.task for call in calls), return_exceptions=True)

    async def _in_time(self, turn: DonorTurn, call: _Call) -> _Chunk:
        """Wait for a chunk. Raises `TooSlow`."""
        try:
            async with asyncio.timeout(turn.left_s(call.asked_s, call.length)) as limit:
                chunk = await call.task
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TooSlow(turn.bytes_per_s) from error
        turn.came(call.asked_s, len(chunk.content))
        return chunk

    def _begin(self, peer: str, download: _Download, turn: DonorTurn) -> _Call:
        """The chunk where the download stands, whatever the total."""
        return self._call(peer, download, None, turn.length_bytes)

    def _call(self, peer: str, download: _Download, offset: int | None, length: int) -> _Call:
        task = asyncio.create_task(self._chunk(peer, download, offset, length))
        return _Call(task, now.monotonic_s(), length)

    async def _chunk(
        self, peer: str, download: _Download, offset: int | None, length: int
    ) -> _Chunk:
        """The chunk at `offset`; None: where the download stands, whatever the total."""
        at = download.offset if offset is None else offset
        request = encode(_Request(download.digest, at, length))
        reply = await self._ask(peer, request)
        chunk = decode(reply, _Chunk, length + 64)
        if not 0 <= chunk.total_bytes <= download.max_bytes:
            raise PeerFault(
                f"a blob of {chunk.total_bytes} bytes, at most {download.max_bytes}", peer
            )
        if offset is not None and chunk.total_bytes != download.total:
            raise PeerFault(f"a blob of {chunk.total_bytes} bytes that had {download.total}", peer)
        if len(chunk.content) != max(0, min(length, chunk.total_bytes - at)):
            raise PeerFault(f"a chunk of {len(chunk.content)} bytes", peer)
        self.received_bytes += len(chunk.content)
        return chunk

    async def _ask(self, peer: str, request: bytes) -> bytes:
        """Ask, and ask a busy peer again a few times. Over a fast line chunks are asked for faster
        than a peer lets newcomers have them."""
        for pause_s in BUSY_PAUSES_S:
            try:
                return await self._plane.call(peer, request, CHUNK_DEADLINE_S)
            except Refused as refusal:
                if refusal.cause != BUSY:
                    raise
            await asyncio.sleep(pause_s)
        return await self._plane.call(peer, request, CHUNK_DEADLINE_S)

    async def _serve(self, sender: str, body: bytes) -> bytes:
        request = decode(body, _Request, 256)
        sane = 0 <= request.offset < 1 << 60 and 0 < request.length <= CHUNK_LIMIT_BYTES
        if not _DIGEST.fullmatch(request.digest) or not sane:
            raise PeerFault("a request for no possible blob")
        chunk = await self._read(sender, request)
        if sender not in self.given_bytes and len(self.given_bytes) >= PEERS_REMEMBERED:
            self.given_bytes.clear()
            self._gave_at_s.clear()
        self.given_bytes[sender] += len(chunk.content)
        self._gave_at_s[sender] = now.monotonic_s()
        return encode(chunk)

    async def _read(self, sender: str, request: _Request) -> _Chunk:
        try:
            self._may_have(sender, request.digest)
            if (found := self._open_blob(request.digest)) is None:
                raise PeerFault(f"blob {request.digest[:12]} is not here")
            if not isinstance(found, Path):
                end = request.offset + request.length
                return _Chunk(len(found), bytes(found[request.offset : end]))
            await self._require_sound(request.digest)
            part = await asyncio.to_thread(read_part, found, request.offset, request.length)
            return _Chunk(*part)
        except FileNotFoundError as error:
            raise PeerFault(f"blob {request.digest[:12]} is no longer here") from error
        except OSError as error:
            log.warning("blob %s cannot be read: %s", request.digest[:12], error)
            raise PeerFault(f"blob {request.digest[:12]} cannot be read here") from error

    async def _require_sound(self, digest: str) -> None:
        """Read a file whole before its first chunk is given. Raises `FileNotFoundError`. One file
        is read at a time, and other requests wait without a thread: all of the daemon's work needs
        the few there are."""
        if self._unread(digest) is None:
            return
        async with self._reads:
            read = self._unread(digest)  # another request may have done it meanwhile
            if read is not None and not await asyncio.to_thread(read):
                raise FileNotFoundError(digest)

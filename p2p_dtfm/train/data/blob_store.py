"""A directory of files named by the hash of their content.

A name is the hexadecimal BLAKE2b-256 of the bytes, so a blob can come from anybody: bytes that do
not hash to it are refused on the way in. A blob that rots on disk is moved to `quarantine/`.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.ports import disk
from p2p_dtfm.train.data.atomic_file import TEMPORARY_PREFIX, temporary_path

BLOB_LIMIT_BYTES = 1 << 30
"""Most bytes of a blob from others. This peer's own blobs are as large as its layers are."""
BLOBS_NAME = "blobs"
"""The folder of blobs in a run's directory, and in that of prepared data."""
QUARANTINE = "quarantine"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20


def is_digest(text: str) -> bool:
    """Whether `text` is 64 lower-case hexadecimal digits, and so no path to anywhere else."""
    return _DIGEST.fullmatch(text) is not None


def file_digest(path: Path) -> str:
    """Hexadecimal BLAKE2b-256 of a file, read in chunks. Raises OSError."""
    hasher = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def blobs_in(directory: Path) -> "BlobStore | None":
    """The blobs of a run, or of prepared data; None where there is no such folder."""
    root = directory / BLOBS_NAME
    return BlobStore(root) if root.is_dir() else None


def keeps_blobs(directory: Path) -> bool:
    """Whether the directory's folder of that name holds blobs, and nothing else."""
    try:
        names = os.listdir(directory / BLOBS_NAME)
    except OSError:
        return False
    return any(map(is_digest, names)) and all(map(_is_of_a_store, names))


def _is_of_a_store(name: str) -> bool:
    return is_digest(name) or name == QUARANTINE or name.startswith(TEMPORARY_PREFIX)


class BlobStore:
    """Blobs under `root`, which is made if need be. A full disk raises OSError."""

    def __init__(self, root: Path, limit_bytes: int = BLOB_LIMIT_BYTES) -> None:
        self.root = Path(root)
        self.limit_bytes = limit_bytes
        self.root.mkdir(parents=True, exist_ok=True)
        self._sound = set[str]()
        """Digests of the blobs that this process has read or written whole."""

    def path(self, digest: str) -> Path | None:
        """The path of a blob; None if it is not here. Raises `PeerFault` if `digest` is
        malformed."""
        path = self._place(digest)
        return path if path.is_file() else None

    def held(self, digest: str) -> Path:
        """The path of a blob that is known to be here."""
        path = self.path(digest)
        assert path is not None, f"{digest} is in the store"
        return path

    def has(self, digest: str) -> bool:
        return self.path(digest) is not None

    def digests(self) -> list[str]:
        """All blobs here, sorted."""
        return sorted(entry.name for entry in os.scandir(self.root) if is_digest(entry.name))

    def put_bytes(
        self,
        payload: bytes | memoryview,
        wrote: Callable[[], None] = lambda: None,
        found: Callable[[str], None] = lambda digest: None,
    ) -> str:
        """Store `payload` and return its digest. `wrote` is called after each piece. `found` is
        called with the digest before there is a blob of that name."""
        temporary, hasher = self.temporary_path(), hashlib.blake2b(digest_size=32)
        try:
            with temporary.open("wb") as file:
                for start in range(0, len(payload) or 1, _CHUNK_BYTES):
                    piece = memoryview(payload)[start : start + _CHUNK_BYTES]
                    disk.write(file, piece)
                    hasher.update(piece)
                    wrote()
            found(digest := hasher.hexdigest())
            return self._name(temporary, digest)
        finally:
            temporary.unlink(missing_ok=True)

    def put_file(self, path: Path) -> str:
        """Store a file, by hard link where the filesystem allows, and return its digest.

        A linked file must not be changed in place afterwards; it may be replaced.
        """
        temporary = self.temporary_path()
        try:
            temporary.unlink()
            try:
                os.link(os.path.realpath(path), temporary)  # a link to a link would go with it
            except OSError:  # another filesystem, or one without links
                shutil.copyfile(path, temporary)
            return self._name(temporary, file_digest(temporary))
        finally:
            temporary.unlink(missing_ok=True)

    def adopt(self, temporary: Path, digest: str) -> Path:
        """Take over a file that a peer sent, if it hashes to `digest`; otherwise remove it.

        `temporary` is gone afterwards either way. Raises `PeerFault` if it is not that blob.
        """
        place = self._place(digest)
        try:
            size = temporary.stat().st_size
            if size > self.limit_bytes:
                raise PeerFault(f"blob of {size} bytes, more than the limit {self.limit_bytes}")
            found = file_digest(temporary)
            if found != digest:
                raise PeerFault(f"blob {digest[:12]} whose bytes hash to {found[:12]}")
            try:
                os.replace(temporary, place)
            except OSError:  # it lies on another filesystem
                self.put_file(temporary)
        finally:
            temporary.unlink(missing_ok=True)
        self._sound.add(digest)
        return place

    def temporary_path(self) -> Path:
        """A new empty file on the store's filesystem, to write a download into."""
        return temporary_path(self.root)

    def verify(self, digest: str) -> bool:
        """Whether the blob is here and sound. A blob that is not sound goes to quarantine. One that
        cannot be read stays, for it may be sound."""
        try:
            path = self.path(digest)
            if path is None:
                return False
            is_sound = file_digest(path) == digest
        except OSError:
            return False
        if is_sound:
            self._sound.add(digest)
            return True
        self.quarantine(digest)
        return False

    def unread(self, digest: str) -> Callable[[], bool] | None:
        """The slow work to do before the blob is given to others: `verify`. None if there is none,
        because this process has verified or written the blob already, or because it is not here."""
        if digest in self._sound or not self.has(digest):
            return None
        return partial(self.verify, digest)

    def quarantine(self, digest: str) -> Path | None:
        """Put a blob aside so that it is fetched again. Returns where it lies now; None if it is
        not here, or its disk does not move it.

        Of each digest only the last bad copy is kept.
        """
        aside = self.root / QUARANTINE
        try:
            path = self.path(digest)
            if path is None:
                return None
            self._sound.discard(digest)
            aside.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # somebody else was faster
                os.replace(path, aside / digest)
        except OSError:
            return None
        return aside / digest

    def remove(self, digest: str) -> None:
        """Forget a blob. Nothing happens if it is not here."""
        self._place(digest).unlink(missing_ok=True)
        self._sound.discard(digest)

    def remove_temporary_files(self, but: Collection[str] = ()) -> None:
        """Remove what an interrupted process left, except for the names in `but`. Call it only
        while nobody else writes here."""
        for entry in os.scandir(self.root):
            if entry.name.startswith(TEMPORARY_PREFIX) and entry.name not in but:
                Path(entry.path).unlink(missing_ok=True)

    def _place(self, digest: str) -> Path:
        if not is_digest(digest):
            raise PeerFault(f"digest that is not 64 hexadecimal digits: {digest[:80]!r}")
        return self.root / digest

    def _name(self, temporary: Path, digest: str) -> str:
        # Between two links to one file, rename does nothing and leaves both: the caller's unlink
        # of the temporary name takes care of that.
        os.replace(temporary, self._place(digest))
        self._sound.add(digest)
        return digest

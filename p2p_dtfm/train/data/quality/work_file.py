"""The verdicts on the documents so far. They are on disk, since there may be more than fit in
memory.

A SQLite file, written in transactions. After a kill it holds all verdicts up to some document. The
next run goes on from there if files and wishes are the same.
"""

import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from p2p_dtfm.core.protocol.errors import UserError

WORK_NAME = ".tmp-choosing.sqlite"
WORK_NAMES = (WORK_NAME, f"{WORK_NAME}-journal")
_CACHE_KIB = 64 << 10
_CANDIDATES_LIMIT = 64
"""A new text is compared with at most so many texts that share a band with it."""
COMMIT_EVERY_DOCUMENTS = 1 << 10
_COMMIT_EVERY_BYTES = 1 << 24
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS verdicts (
    file INTEGER, first INTEGER, codes BLOB, PRIMARY KEY (file, first)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS texts (digest BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS bands (
    key INTEGER, signature INTEGER, PRIMARY KEY (key, signature)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS signatures (number INTEGER PRIMARY KEY, hashes BLOB);
"""


class WorkFile:
    """`wish` names what is asked of which files; verdicts for another wish are thrown away.

    Raises `UserError` if another process uses the file.
    """

    def __init__(self, folder: Path, wish: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / WORK_NAME
        with self.explained():
            try:
                self._open(wish)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:  # torn: its verdicts are computed again
                self.remove()
                self._open(wish)
        self._codes = array("B")
        """Verdicts on the file's documents since the last `put_down`."""
        self._documents = self._text_bytes = 0
        """Documents and bytes of text since the last commit."""

    def _open(self, wish: str) -> None:
        self._base = sqlite3.connect(
            self.path,
            isolation_level=None,
            timeout=0,
            check_same_thread=False,  # the library that learns tokens reads in a thread of its own
        )
        self._base.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._base.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._base.executescript(_TABLES)
        self._base.execute("BEGIN")
        if self._fact("wish") != wish:
            for table in ("facts", "verdicts", "texts", "bands", "signatures"):
                self._base.execute(f"DELETE FROM {table}")
            self._base.execute("INSERT INTO facts VALUES ('wish', ?)", (wish,))
            self._commit()

    def judged(self, file: int) -> int:
        """How many documents of a file have a verdict."""
        row = self._base.execute(
            "SELECT first + length(codes) FROM verdicts WHERE file = ? ORDER BY first DESC LIMIT 1",
            (file,),
        ).fetchone()
        return (row[0] if row else 0) + len(self._codes)

    @property
    def files_done(self) -> int:
        return int(self._fact("files done") or 0)

    def note(self, code: int, text_bytes: int) -> None:
        """Note the verdict on the next document of the file, which has so much text."""
        self._codes.append(code)
        self._documents += 1
        self._text_bytes += text_bytes

    @property
    def is_due(self) -> bool:
        """Whether it is time to `keep`. Each `keep` waits for the disk, so it is not called after
        each of very many small files."""
        many = self._documents >= COMMIT_EVERY_DOCUMENTS
        return many or self._text_bytes > _COMMIT_EVERY_BYTES

    def put_down(self, file: int, *, is_done: bool = False) -> None:
        """Put the noted verdicts into the file. A process that is ended loses them until `keep`."""
        if self._codes:
            first = self.judged(file) - len(self._codes)
            self._base.execute(
                "INSERT INTO verdicts VALUES (?, ?, ?)", (file, first, self._codes.tobytes())
            )
            self._codes = array("B")
        if is_done:
            self._base.execute(
                "INSERT OR REPLACE INTO facts VALUES ('files done', ?)", (str(file + 1),)
            )

    def keep(self) -> None:
        """Make the verdicts that were put down outlive this process."""
        self._commit()
        self._documents = self._text_bytes = 0

    def drop(self, file: int) -> None:
        """Remove the verdicts on a file that turned out not to be usable."""
        self._codes = array("B")
        self._base.execute("DELETE FROM verdicts WHERE file = ?", (file,))

    def is_new(self, digest: bytes) -> bool:
        """Whether no text with this hash came before. Notes that one has come now."""
        found = self._base.execute("INSERT OR IGNORE INTO texts VALUES (?)", (digest,))
        return found.rowcount == 1

    def candidates(self, bands: Iterable[int]) -> Iterator[np.ndarray]:
        """Signatures of texts that share a band."""
        seen: set[int] = set()
        for key in bands:
            for (number,) in self._base.execute(
                "SELECT signature FROM bands WHERE key = ? LIMIT ?", (key, _CANDIDATES_LIMIT)
            ).fetchall():
                if number not in seen and len(seen) < _CANDIDATES_LIMIT:
                    seen.add(number)
                    row = self._base.execute(
                        "SELECT hashes FROM signatures WHERE number = ?", (number,)
                    ).fetchone()
                    yield np.frombuffer(row[0], dtype=np.uint64)

    def add_signature(self, signature: np.ndarray, bands: Iterable[int]) -> None:
        number = self._base.execute(
            "INSERT INTO signatures (hashes) VALUES (?)", (signature.tobytes(),)
        ).lastrowid
        self._base.executemany(
            "INSERT OR IGNORE INTO bands VALUES (?, ?)", [(key, number) for key in bands]
        )

    def codes(self, file: int) -> Iterator[int]:
        """The verdicts on a file's documents, in order."""
        for (codes,) in self._base.execute(
            "SELECT codes FROM verdicts WHERE file = ? ORDER BY first", (file,)
        ):
            yield from codes

    def count(self, codes_limit: int) -> list[int]:
        """How many documents have each code below the limit."""
        counts = np.zeros(codes_limit, dtype=np.int64)
        for (codes,) in self._base.execute("SELECT codes FROM verdicts"):
            counts += np.bincount(np.frombuffer(codes, dtype=np.uint8), minlength=codes_limit)
        return [int(count) for count in counts]

    def close(self) -> None:
        """Close the file. Verdicts since the last `keep` are lost."""
        self._base.close()

    def remove(self) -> None:
        """Remove the file, which is not needed any more."""
        self._base.close()
        for name in WORK_NAMES:
            self.path.with_name(name).unlink(missing_ok=True)

    def _fact(self, name: str) -> str | None:
        row = self._base.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _commit(self) -> None:
        self._base.execute("COMMIT")
        self._base.execute("BEGIN")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Around all reading and writing here. Raises `UserError` for what a user can do something
        about."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise UserError(
                    f"another process is preparing data in {self.path.parent}",
                    "wait for it, or choose another --out directory",
                ) from error
            raise UserError(
                f"cannot write {self.path}: {error}", "free space there, or choose another --out"
            ) from error

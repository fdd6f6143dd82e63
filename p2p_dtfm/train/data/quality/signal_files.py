"""Signals that others have computed: RedPajama-V2's files, which have a line for each document.

They lie beside the documents, or in `quality_signals/` where the documents are in `documents/`.
Each signal is a list of [start, end, value]: one for the whole document, or one for each line,
whose mean is taken. A missing value is null.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.formats.compressed import BoundedLines, inner_name, open_lines

LINE_LIMIT_BYTES = 1 << 26
_LOOKED_AT_LINES = 100
"""Documents that are searched for names of signals: not each document need have each signal."""
_ENDINGS = ("", ".gz", ".zst")

Span = tuple[float, float, float | None]
_SIGNALS = dict[str, list[Span]]


class _Row(msgspec.Struct):
    id: str = ""
    quality_signals: _SIGNALS | str = ""


def is_signal_file(path: Path) -> bool:
    """Whether the file's lines say something about documents, and are no documents themselves."""
    name = inner_name(path)
    return name.endswith((".signals.json", ".signals.jsonl"))


def signal_file_of(path: Path) -> Path | None:
    """The signal file that belongs to a file of documents, if there is one."""
    stem = inner_name(path).rpartition(".")[0]
    stem = path.name[: len(stem)]  # with its own upper and lower case
    folders = [path.parent]
    for place, part in enumerate(path.parent.parts):
        if part == "documents":
            parts = path.parent.parts
            folders.append(Path(*parts[:place], "quality_signals", *parts[place + 1 :]))
    for folder in folders:
        for ending in _ENDINGS:
            for kind in (".signals.json", ".signals.jsonl"):
                found = folder / f"{stem}{kind}{ending}"
                if found.is_file():
                    return found
    return None


def names_in(path: Path) -> set[str]:
    """The signals that any of the first documents has. Raises `UserError` and OSError."""
    with open_lines(path, LINE_LIMIT_BYTES) as lines:
        first = itertools.islice(lines, _LOOKED_AT_LINES)
        return set().union(*(_named(path, number, line) for number, line in first))


class SignalFile:
    """A signal file, read in step with the documents. Raises `UserError` where they do not
    match."""

    def __init__(self, path: Path, lines: BoundedLines) -> None:
        self._path = path
        self._lines: Iterator[tuple[int, bytes]] = iter(lines)

    def of_line(self, wanted: int) -> Mapping[str, float]:
        """The signals of the document in this line of its file; lines only go up."""
        try:
            for number, line in self._lines:
                if number == wanted:
                    return _read(self._path, number, line)
        except OSError as error:
            raise UserError(f"cannot read {self._path}: {error}", "fetch it again") from error
        raise UserError(
            f"{self._path} has no line {wanted}, which its documents have",
            ("fetch both files again", "leave the signals out: move that file away"),
        )


def _named(path: Path, number: int, line: bytes) -> set[str]:
    """All signals of a line, also those that have no value for this document."""
    return set(_signals(path, number, line))


def _read(path: Path, number: int, line: bytes) -> dict[str, float]:
    signals = _signals(path, number, line)
    return {name: value for name, spans in signals.items() if (value := _mean(spans)) is not None}


def _signals(path: Path, number: int, line: bytes) -> _SIGNALS:
    try:
        row = msgspec.json.decode(line, type=_Row)
        signals = row.quality_signals
        if isinstance(signals, str):  # as some tools write them
            signals = msgspec.json.decode(signals, type=_SIGNALS) if signals else {}
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise UserError(
            f"line {number} of {path} holds no quality signals: {error}",
            "fetch or write that file again, or move it away",
        ) from error
    place = row.id.rpartition("/")[2]
    if place.isascii() and place.isdigit() and int(place) != number - 1:
        raise UserError(
            f"line {number} of {path} is about document {place}, not about {number - 1}",
            "fetch documents and signals again: their lines must match",
        )
    return signals


def _mean(spans: list[Span]) -> float | None:
    values = [value for _, _, value in spans if value is not None]
    return sum(values) / len(values) if values else None

"""Text files to token shards, a tokenizer file and a manifest.

The files are read twice. The first reading finds out which are text and which pieces are held out;
the second one writes. (With byte-pair encoding a reading for training lies between.) Memory stays
bounded: a few pieces at a time, and a few bytes for each piece.

A document is a file; a file longer than a piece counts as several, since else the text of a single
big file could not be split. The pieces with the lowest content hashes are held out, so equal
documents are never on both sides, and the split does not depend on where the files lie.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from p2p_dtfm.core.errors import PeerFault, UserError
from p2p_dtfm.train.data.atomic_file import write_atomically
from p2p_dtfm.train.data.blob_store import BlobStore
from p2p_dtfm.train.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_LIMIT_BYTES,
    SHARD_LIMIT_TOKENS,
    Manifest,
    Notes,
    Split,
    TokenizerEntry,
    Totals,
    load_manifest,
    parse_manifest,
    token_type_for,
)
from p2p_dtfm.train.data.shard_files import ShardWriter
from p2p_dtfm.train.data.text_files import (
    Candidate,
    NotText,
    Skipped,
    find_files,
    read_pieces,
)
from p2p_dtfm.train.data.tokenizer import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
)

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
BLOBS_NAME = "blobs"

Progress = Callable[[int, int, str], None]
"""Bytes done, bytes in all, and the stage: "reading", "learning tokens" or "writing"."""

_PIECE_BYTES = (1 << 10, 1 << 16)
"""Least and most. A batch of large ones, encoded, takes a hundred times its size."""
_BPE_TRAINING_LIMIT_BYTES = 1 << 28
_BATCH_PIECES = 16


@dataclass(frozen=True)
class Prepared:
    """A prepared directory, opened."""

    manifest: Manifest
    tokenizer: Tokenizer
    store: BlobStore
    """Holds every blob of the manifest, and the manifest itself, by digest."""


@dataclass(frozen=True)
class _Piece:
    text: bytes
    key: int
    """A hash of content and place in the file; low ones are held out."""
    ends_document: bool


@dataclass(frozen=True)
class _Survey:
    """What the first reading found."""

    files: list[Candidate]
    text_bytes: int
    piece_bytes: int
    threshold: int
    """A piece is held out if its key is at most this."""


def prepare(
    paths: list[Path],
    out: Path,
    *,
    vocabulary: int | None = None,
    shard_tokens: int = 1 << 20,
    held_out_fraction: float = 0.02,
    context: int = 128,
    progress: Progress = lambda done_bytes, total_bytes, stage: None,
    name: str = "",
    licence: str = "",
    source: str = "",
    skipped: Skipped | None = None,
    tokenizer: Tokenizer | None = None,
) -> Manifest:
    """Make the directory `out` from text files and directories. Raises `UserError`.

    `vocabulary`: None for bytes, else the tokens of a byte-pair encoding learnt from the text.
    `tokenizer`: one that is there already, instead of either.
    `context`: both splits must hold at least one window of context + 1 tokens.
    `skipped`: filled with counts of what was left out, if given.
    """
    skipped = Skipped() if skipped is None else skipped
    _require_sane(vocabulary, shard_tokens, held_out_fraction, context, (name, licence, source))
    replaces = _require_ours(out)
    files = find_files(paths, out, skipped)
    survey = _survey(files, held_out_fraction, context, progress, skipped)
    if not survey.files:
        raise UserError(
            f"no text found in {', '.join(map(str, paths)) or 'no paths'} (skipped: {skipped})",
            "name files or directories with UTF-8 text",
        )
    if tokenizer is None:
        tokenizer = _make_tokenizer(survey, vocabulary, progress)
    try:
        store = BlobStore(out / BLOBS_NAME)
        store.remove_temporary_files()
        notes = Notes(*(_printable(note) for note in (name, licence, source)))
        manifest = _write(survey, tokenizer, store, shard_tokens, context, notes, progress)
        payload = manifest.to_bytes()
        _require_readable(payload, shard_tokens)
        store.put_bytes(payload)
        write_atomically(out / TOKENIZER_NAME, tokenizer.to_bytes())
        write_atomically(out / MANIFEST_NAME, payload)
        if replaces:
            _remove_unused(store, manifest)
    except OSError as error:
        raise UserError(
            f"cannot write to {out}: {error.strerror}", "free disk space or choose another --out"
        ) from error
    return manifest


def open_prepared(out: Path) -> Prepared:
    """Open a directory that `prepare` made; of its shards only the sizes are checked here.

    Raises `UserError`.
    """
    fix = f"make the data anew: p2p-dtfm prepare PATH... --out {out}"
    if not out.is_dir():
        raise UserError(f"no prepared data in {out}", f"p2p-dtfm prepare PATH... --out {out}")
    manifest = load_manifest(out / MANIFEST_NAME)
    folder = out / BLOBS_NAME
    if not folder.is_dir():
        raise UserError(f"{folder} is missing", fix)
    store = BlobStore(folder)
    for digest, size_bytes in manifest.blobs().items():
        path = store.path(digest)
        if path is None or path.stat().st_size != size_bytes:
            raise UserError(f"{folder / digest} is missing or has the wrong size", fix)
    if not store.verify(manifest.tokenizer.digest):
        raise UserError(f"the tokenizer in {folder} was corrupt and is now in quarantine", fix)
    tokenizer = load_tokenizer(folder / manifest.tokenizer.digest)
    if tokenizer.vocabulary != manifest.vocabulary:
        raise UserError(f"tokenizer and manifest in {out} disagree about the vocabulary", fix)
    return Prepared(manifest, tokenizer, store)


def _require_sane(
    vocabulary: int | None,
    shard_tokens: int,
    held_out_fraction: float,
    context: int,
    notes: tuple[str, ...],
) -> None:
    if vocabulary is not None and not 257 <= vocabulary <= 1 << 20:
        raise UserError(
            f"a vocabulary of {vocabulary} cannot be learnt",
            ("choose 257 to 1048576 tokens (4096 suits small models)", "leave it out for bytes"),
        )
    if not 1 <= shard_tokens <= SHARD_LIMIT_TOKENS:
        raise UserError(f"shards of {shard_tokens} tokens", f"choose 1 to {SHARD_LIMIT_TOKENS}")
    if shard_tokens <= context:
        raise UserError(
            f"shards of {shard_tokens} tokens hold no window of {context + 1} tokens",
            "make shards larger or the context smaller",
        )
    if not 0 < held_out_fraction <= 0.5:
        raise UserError(f"held-out fraction of {held_out_fraction}", "choose between 0 and 0.5")
    if any(len(note.encode("utf-8", "replace")) > 2000 for note in notes):
        raise UserError("name, licence or source is longer than 2000 bytes", "shorten it")


def _printable(note: str) -> str:
    """Without what a terminal in another encoding may have put there, and JSON cannot hold."""
    return note.encode("utf-8", "replace").decode("utf-8")


def _require_ours(out: Path) -> bool:
    """Refuse a directory with other people's files; whether an earlier result is in it."""
    try:
        names = {entry.name for entry in os.scandir(out)} if out.exists() else set()
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}", "choose another --out directory") from error
    foreign = sorted(
        name
        for name in names - {MANIFEST_NAME, TOKENIZER_NAME, BLOBS_NAME}
        if not name.startswith(".tmp-")
    )
    if foreign:
        raise UserError(
            f"{out} holds files that are not prepared data, such as {foreign[0]!r}",
            "choose an empty or new directory for --out",
        )
    try:
        if MANIFEST_NAME in names:
            load_manifest(out / MANIFEST_NAME)
    except UserError as error:
        raise UserError(
            f"{out} is in the way: {error.cause}", "remove it or choose another --out directory"
        ) from error
    return MANIFEST_NAME in names


def _remove_unused(store: BlobStore, manifest: Manifest) -> None:
    """Remove what earlier results and interrupted runs left."""
    used = {*manifest.blobs(), manifest.digest()}
    for digest in store.digests():
        if digest not in used:
            store.remove(digest)


def _survey(
    files: list[Candidate],
    held_out_fraction: float,
    context: int,
    progress: Progress,
    skipped: Skipped,
) -> _Survey:
    """First reading: which files are text, and which pieces are held out."""
    total_bytes = sum(file.size_bytes for file in files)
    smallest, largest = _PIECE_BYTES
    piece_bytes = min(max(int(total_bytes * held_out_fraction / 4), smallest), largest)
    kept, keys, sizes, done_bytes, text_bytes = [], [], [], 0, 0
    for file in files:
        done_bytes += file.size_bytes
        pieces = _survey_file(file, piece_bytes, skipped)
        if pieces:
            kept.append(file)
            keys.append(np.array([key for key, _ in pieces], dtype=np.uint64))
            sizes.append(np.array([size for _, size in pieces], dtype=np.int64))
            text_bytes += int(sizes[-1].sum())
        progress(done_bytes, total_bytes, "reading")
    # A window may take several bytes a token; the exact check comes when the tokens are there.
    wanted_bytes = min(max(text_bytes * held_out_fraction, 2 * (context + 1)), text_bytes / 2)
    threshold = _threshold(keys, sizes, wanted_bytes) if kept else 0
    return _Survey(kept, text_bytes, piece_bytes, threshold)


def _survey_file(file: Candidate, piece_bytes: int, skipped: Skipped) -> list[tuple[int, int]]:
    """Key and size of each piece; empty if the file cannot be used."""
    try:
        return [(piece.key, len(piece.text)) for piece in _pieces(file.path, piece_bytes)]
    except NotText:
        skipped.not_text += 1
    except OSError as error:
        if file.named:
            raise UserError(
                f"cannot read {file.path}: {error.strerror}", "check its permissions"
            ) from error
        skipped.note_unreadable(error)
    return []


def _threshold(keys: list[np.ndarray], sizes: list[np.ndarray], wanted_bytes: float) -> int:
    """The key up to which pieces must be held out to make `wanted_bytes` of them."""
    every_key, every_size = np.concatenate(keys), np.concatenate(sizes)
    order = np.argsort(every_key, kind="stable")
    place = int(np.searchsorted(np.cumsum(every_size[order]), wanted_bytes))
    return int(every_key[order[min(place, len(order) - 1)]])


def _pieces(path: Path, piece_bytes: int) -> Iterator[_Piece]:
    """The pieces of a file, one behind, since only then is it known which is the last."""
    held: bytes | None = None
    number = 0
    for text in read_pieces(path, piece_bytes):
        if held is not None:
            yield _Piece(held, _key(held, number), ends_document=False)
            number += 1
        held = text
    if held is not None:
        yield _Piece(held, _key(held, number), ends_document=True)


def _key(text: bytes, number: int) -> int:
    # With its number in the file, the repeats within one monotonous file fall on either side.
    salt = number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=salt).digest(), "little")


def _make_tokenizer(survey: _Survey, vocabulary: int | None, progress: Progress) -> Tokenizer:
    if vocabulary is None:
        return ByteTokenizer()
    from p2p_dtfm.train.data.byte_pairs import BytePairTokenizer  # a heavy library, only for this

    try:
        return BytePairTokenizer.train(_training_texts(survey, progress), vocabulary)
    except PeerFault as error:
        raise AssertionError(f"the tokenizer just trained is refused: {error}") from error


def _training_texts(survey: _Survey, progress: Progress) -> Iterator[str]:
    """Training text, of a huge corpus every so many-th piece."""
    stride = -(-survey.text_bytes // _BPE_TRAINING_LIMIT_BYTES)
    done_bytes = count = 0
    for file in survey.files:
        for piece in _pieces_again(file, survey):
            done_bytes += len(piece.text)
            count += 1
            if piece.key > survey.threshold and count % stride == 0:
                yield piece.text.decode("utf-8")
        progress(done_bytes, survey.text_bytes, "learning tokens")


def _write(
    survey: _Survey,
    tokenizer: Tokenizer,
    store: BlobStore,
    shard_tokens: int,
    context: int,
    notes: Notes,
    progress: Progress,
) -> Manifest:
    """Second reading: tokens into shards."""
    token_type = token_type_for(tokenizer.vocabulary)
    train, held_out = (
        ShardWriter(store, split, token_type, shard_tokens) for split in ("train", "held_out")
    )
    try:
        _write_tokens(survey, tokenizer, train, held_out, progress)
        for writer in (train, held_out):
            writer.close()
    finally:
        for writer in (train, held_out):
            writer.abandon()
    for split, writer in (("training", train), ("held-out", held_out)):
        if writer.tokens <= context:
            raise UserError(
                f"too little text: {writer.tokens} {split} tokens do not make one window of "
                f"{context + 1} (from {survey.text_bytes} bytes of text)",
                ("add text", "choose a smaller context"),
            )
    tokenizer_file = tokenizer.to_bytes()
    return Manifest(
        format_version=FORMAT_VERSION,
        token_type=token_type,
        tokenizer=TokenizerEntry(
            store.put_bytes(tokenizer_file), len(tokenizer_file), tokenizer.vocabulary
        ),
        shards=(*train.entries, *held_out.entries),
        totals=Totals(train.tokens, held_out.tokens, len(survey.files), survey.text_bytes),
        notes=notes,
    )


def _write_tokens(
    survey: _Survey,
    tokenizer: Tokenizer,
    train: ShardWriter,
    held_out: ShardWriter,
    progress: Progress,
) -> None:
    """Each document, or each stretch of one within a split, ends with END_OF_DOCUMENT."""
    separator = tokenizer.encode(END_OF_DOCUMENT)
    writers: dict[Split, ShardWriter] = {"train": train, "held_out": held_out}
    open_split: Split | None = None
    done_bytes = 0
    pieces = (piece for file in survey.files for piece in _pieces_again(file, survey))
    while batch := list(islice(pieces, _BATCH_PIECES)):
        for piece, tokens in zip(
            batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True
        ):
            split: Split = "held_out" if piece.key <= survey.threshold else "train"
            if open_split not in (None, split):
                writers[open_split].append(separator)
            writers[split].append(tokens)
            if piece.ends_document:
                writers[split].append(separator)
            open_split = None if piece.ends_document else split
            done_bytes += len(piece.text)
        progress(done_bytes, survey.text_bytes, "writing")


def _pieces_again(file: Candidate, survey: _Survey) -> Iterator[_Piece]:
    """A file's pieces on a later reading, when nothing may be wrong with it any more."""
    try:
        yield from _pieces(file.path, survey.piece_bytes)
    except (NotText, OSError) as error:
        raise UserError(
            f"{file.path} changed while it was being read: {error}", "run the command again"
        ) from error


def _require_readable(payload: bytes, shard_tokens: int) -> None:
    """A manifest that peers would refuse must not leave this machine."""
    if len(payload) > MANIFEST_LIMIT_BYTES:
        raise UserError(
            f"{len(payload)} bytes of manifest, more than the limit of {MANIFEST_LIMIT_BYTES}",
            f"make shards larger than {shard_tokens} tokens",
        )
    try:
        parse_manifest(payload)
    except PeerFault as error:
        raise AssertionError(f"the manifest just made is refused: {error}") from error

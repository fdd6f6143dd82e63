"""Documents to token shards, a tokenizer file and a manifest.

The files are read twice. The first reading finds out which files are text and which pieces are held
out; the second reading writes. (With byte-pair encoding a reading for training lies between.)
Memory stays bounded: a few pieces at a time, and a few bytes for each piece. What is written
outlives a process that is killed (`writing/journal.py`): the same command goes on from there.

The pieces with the lowest content hashes are held out. So equal documents are never on both sides,
and the split does not depend on where the files lie. Files that the user names for it are held out
instead.
"""

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.train.data.atomic_file import clear_temporary_files, fix_of, write_atomically
from p2p_dtfm.train.data.blob_store import BLOBS_NAME, BlobStore
from p2p_dtfm.train.data.documents import require_rows
from p2p_dtfm.train.data.first_reading import PROGRESS_EVERY_PIECES, Progress, Survey, read_first
from p2p_dtfm.train.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_LIMIT_BYTES,
    SHARD_LIMIT_TOKENS,
    Manifest,
    Notes,
    Totals,
    load_manifest,
    parse_manifest,
    token_type_for,
)
from p2p_dtfm.train.data.quality.choosing import Wish, chosen
from p2p_dtfm.train.data.quality.signal_files import is_signal_file
from p2p_dtfm.train.data.quality.work_file import WORK_NAMES
from p2p_dtfm.train.data.text_files import (
    Skipped,
    find_files,
)
from p2p_dtfm.train.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    as_stated,
    entry_of,
    load_tokenizer,
)
from p2p_dtfm.train.data.writing.journal import JOURNAL_NAME, Journal, WrittenSoFar, alone_in
from p2p_dtfm.train.data.writing.second_reading import SecondReading

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"

_PIECE_BYTES = (1 << 10, 1 << 16)
"""Least and most bytes of a piece. A batch of large pieces, encoded, takes 100 times its size."""
LEAST_SHARD_TOKENS = 1 << 20
MOST_SHARDS = 100_000
"""Most shards of a manifest: each takes some 115 bytes of it (`manifest.MANIFEST_LIMIT_BYTES`)."""
_BPE_TRAINING_LIMIT_BYTES = 1 << 28
_LONG_WORD_BYTES, _LONG_WORDS_LIMIT_BYTES = 48, 1 << 24
"""Of the text to learn from, how much may be words of more than so many bytes. Learning takes 125
bytes of memory for each byte of words that come once, and nearly all do where no spaces are
written. In other texts hardly any word is so long."""


@dataclass(frozen=True)
class PreparedData:
    """A prepared directory, opened."""

    manifest: Manifest
    tokenizer: Tokenizer
    store: BlobStore
    """Holds every blob of the manifest, and the manifest itself, by digest."""


def prepare(
    paths: list[Path],
    out: Path,
    *,
    vocabulary: int | None = None,
    shard_tokens: int | None = None,
    held_out_fraction: float = 0.02,
    context: int = 128,
    progress: Progress = lambda done_bytes, total_bytes, stage: None,
    name: str = "",
    licence: str = "",
    source: str = "",
    skipped: Skipped | None = None,
    tokenizer: Tokenizer | None = None,
    text_field: str = "text",
    validation: list[Path] | None = None,
    wish: Wish | None = None,
    held_out_by_document: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Manifest:
    """Make the directory `out` from files and directories. Raises `UserError`.

    `text_field`: which field of a row holds its text, where files have rows.
    `validation`: files and directories to hold out, instead of a fraction of all.
    `vocabulary`: None for bytes, else the tokens of a byte-pair encoding learnt from the text.
    `tokenizer`: an existing one, instead of either.
    `shard_tokens`: None for what suits the text (`shard_tokens_for`).
    `context`: both splits must hold at least one window of context + 1 tokens.
    `skipped`: filled with counts of what was left out, if given.
    `wish`: which documents are wanted, and how often each.
    `held_out_by_document`: whether a text file is held out as a whole or not at all.
    `say`: is told from where an interrupted command goes on.
    """
    skipped = Skipped() if skipped is None else skipped
    least = LEAST_SHARD_TOKENS if shard_tokens is None else shard_tokens
    _require_sane(vocabulary, least, held_out_fraction, context)
    notes = notes_of(name, licence, source)
    replaces = require_ours(out)
    files = find_files(paths, validation or [], out, skipped)
    files = [file for file in files if not is_signal_file(file.path)]
    require_rows(files, text_field)
    total_bytes = sum(file.size_bytes for file in files)
    smallest, largest = _PIECE_BYTES
    piece_bytes = min(max(int(total_bytes * held_out_fraction / 4), smallest), largest)
    survey = Survey(text_field, piece_bytes, by_document=held_out_by_document)
    with chosen(wish or Wish(), files, survey, out, progress):
        read_first(survey, files, held_out_fraction, context, progress, skipped)
        for named, held_out in ((paths, False), (validation or [], True)):
            _require_text(survey, named, held_out, skipped)
        if shard_tokens is None:
            begins = tokenizer is not None and tokenizer.start_of_document is not None
            shard_tokens = shard_tokens_for(survey.text_bytes, survey.documents, begins=begins)
        with alone_with(out, replaces) as store:
            clear_temporary_files(out)
            wishes = (vocabulary, shard_tokens, tokenizer and _named(tokenizer))
            journal = Journal(out, _bound_to(survey, wishes), say)
            if tokenizer is None:
                tokenizer = _make_tokenizer(survey, vocabulary, store, journal, progress)
            reading = SecondReading(survey, tokenizer, store, shard_tokens)
            reading.write(journal, progress)
            with _kept_unless_refused(journal):
                _require_windows(reading, context, survey)
                manifest = _manifest(survey, reading, tokenizer, store, notes)
                finish(out, store, manifest, tokenizer, shard_tokens)
            remove_unused(store, manifest)
    return manifest


def shard_tokens_for(text_bytes: int, documents: int, *, begins: bool = False) -> int:
    """Tokens in a shard, so many that a manifest can name all shards. A token may be as little as a
    byte; one more ends each document, and another one `begins` it. A shard is no larger than that,
    for a member that reads a sequence fetches all of its shard."""
    shard_tokens, marks = LEAST_SHARD_TOKENS, documents * (1 + begins)
    while (text_bytes + marks) // shard_tokens >= MOST_SHARDS:
        shard_tokens *= 2
    return min(shard_tokens, SHARD_LIMIT_TOKENS)


def open_prepared(out: Path) -> PreparedData:
    """Open a directory that `prepare` made; of its shards only the sizes are checked here.

    Raises `UserError`.
    """
    quoted = shlex.quote(str(out))
    fix = f"make the data anew: p2p-dtfm prepare PATH... --out {quoted} --overwrite"
    if _may_be_text(out):
        text = out.resolve() if out.name in ("", "..") else out
        made = text.parent / f"{text.stem if text.is_file() else text.name}-data"
        typed = f"p2p-dtfm prepare {quoted} --out {shlex.quote(str(made))}"
        raise UserError(
            f"no prepared data in {out}",
            (f"make them: {typed}", f'then say source = "{made}"'),
        )
    if not out.is_dir():
        raise UserError(f"no prepared data in {out}", f"p2p-dtfm prepare PATH... --out {quoted}")
    manifest = load_manifest(out / MANIFEST_NAME)
    folder = out / BLOBS_NAME
    if not folder.is_dir():
        raise UserError(f"{folder} is missing", fix)
    store = BlobStore(folder)
    own = {manifest.digest(): len(manifest.to_bytes())}
    for digest, size_bytes in (own | manifest.blobs()).items():
        path = store.path(digest)
        if path is None or path.stat().st_size != size_bytes:
            raise UserError(f"{folder / digest} is missing or has the wrong size", fix)
    if not store.verify(manifest.tokenizer.digest):
        raise UserError(f"the tokenizer in {folder} is corrupt or cannot be read", fix)
    tokenizer = load_tokenizer(folder / manifest.tokenizer.digest)
    if tokenizer.vocabulary != manifest.vocabulary:
        raise UserError(f"tokenizer and manifest in {out} disagree about the vocabulary", fix)
    return PreparedData(manifest, as_stated(tokenizer, manifest.tokenizer), store)


def _may_be_text(out: Path) -> bool:
    """Whether the text itself lies there, perhaps: a file, or files that `prepare` has not made."""
    try:
        names = {entry.name for entry in os.scandir(out)}
    except NotADirectoryError:
        return out.is_file()
    except OSError:
        return False
    ours = (BLOBS_NAME, TOKENIZER_NAME)
    others = [name for name in names if name not in ours and not name.startswith(".tmp-")]
    return MANIFEST_NAME not in names and bool(others)


def _require_sane(
    vocabulary: int | None,
    shard_tokens: int,
    held_out_fraction: float,
    context: int,
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
        raise UserError(
            f"held-out fraction of {held_out_fraction}", "choose 0.5 or less, and more than 0"
        )


def notes_of(*notes: str) -> Notes:
    """Name, licence and source. What a terminal in another encoding may have put there, and JSON
    cannot hold, is replaced. Raises `UserError`."""
    printable = [note.encode("utf-8", "replace") for note in notes]
    if any(len(note) > 2000 for note in printable):
        raise UserError("name, licence or source is longer than 2000 bytes", "shorten it")
    return Notes(*(note.decode("utf-8") for note in printable))


def require_ours(out: Path) -> bool:
    """Refuse a directory with other people's files; returns whether it holds an earlier result. A
    tokenizer alone belongs to a model: that of a result has at least the blobs beside it."""
    try:
        names = {entry.name for entry in os.scandir(out)} if out.exists() else set()
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}", "choose another --out directory") from error
    ours = {MANIFEST_NAME, BLOBS_NAME}
    foreign = sorted(
        name
        for name in names - (ours | {TOKENIZER_NAME} if names & ours else set())
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


@contextmanager
def alone_with(out: Path, replaces: bool) -> Iterator[BlobStore]:
    """Within it, nobody else writes into `out`; gives its store.

    `replaces`: whether a result was there when this command began. It may not replace a result that
    has come since. Raises `UserError`, also for OSError within.
    """
    try:
        store = BlobStore(out / BLOBS_NAME)
        with alone_in(out):
            if require_ours(out) and not replaces:
                raise UserError(
                    f"{out} holds prepared data already, which runs may still need",
                    (
                        "choose a new directory for --out",
                        "replace them: the same line with --overwrite",
                    ),
                )
            yield store
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}", fix_of(error, out)) from error


def finish(
    out: Path, store: BlobStore, manifest: Manifest, tokenizer: Tokenizer, shard_tokens: int
) -> None:
    """From now on `out` holds these data. Raises `UserError` if peers would refuse the manifest."""
    payload = manifest.to_bytes()
    _require_readable(payload, shard_tokens)
    store.put_bytes(payload)
    write_atomically(out / TOKENIZER_NAME, tokenizer.to_bytes())
    write_atomically(out / MANIFEST_NAME, payload)
    for name in (JOURNAL_NAME, *WORK_NAMES):  # of this result, or of one that was given up
        (out / name).unlink(missing_ok=True)


def remove_unused(store: BlobStore, manifest: Manifest) -> None:
    """Remove what earlier results and interrupted runs left."""
    used = {*manifest.blobs(), manifest.digest()}
    for digest in store.digests():
        if digest not in used:
            store.remove(digest)


@contextmanager
def _kept_unless_refused(journal: Journal) -> Iterator[None]:
    """Removes the journal if finished tokens are refused: going on would mend nothing."""
    try:
        yield
    except UserError:
        journal.remove()
        raise


def _bound_to(survey: Survey, wishes: tuple[object, ...]) -> str:
    """A digest of all that the shards' tokens depend on. (The manifest's notes are not in it.)"""
    return digest_bytes(
        msgspec.json.encode(
            (
                survey.content.hexdigest(),
                survey.threshold,
                survey.by_document,
                survey.piece_bytes,
                wishes,
                metadata.version("tokenizers"),
            )
        )
    )


def _named(tokenizer: Tokenizer) -> tuple[str, int, int | None]:
    digest = digest_bytes(tokenizer.to_bytes())
    return digest, tokenizer.end_of_document, tokenizer.start_of_document


def _make_tokenizer(
    survey: Survey, vocabulary: int | None, store: BlobStore, journal: Journal, progress: Progress
) -> Tokenizer:
    """A tokenizer of bytes, or one that is learnt, or that an interrupted command has learnt."""
    if vocabulary is None:
        return ByteTokenizer()
    from p2p_dtfm.train.data.byte_pairs import BytePairTokenizer  # a heavy library, only for this

    if journal.tokenizer is not None:
        if store.verify(journal.tokenizer):
            journal.say("takes the tokens that were learnt before it was interrupted")
            return load_tokenizer(store.held(journal.tokenizer))
        journal.begin_anew("the tokenizer that was learnt is missing or damaged")
    try:
        learnt = BytePairTokenizer.train(_training_texts(survey, progress), vocabulary)
    except PeerFault as error:
        raise AssertionError(f"the tokenizer just trained is refused: {error}") from error
    journal.save(WrittenSoFar(), store.put_bytes(learnt.to_bytes()))
    return learnt


def _training_texts(survey: Survey, progress: Progress) -> Iterator[str]:
    """The training text; of a huge corpus only every `stride`-th piece. Each time that half of what
    was left for long words is used up, pieces are taken from twice as far apart."""
    stride = -(-survey.text_bytes // _BPE_TRAINING_LIMIT_BYTES)
    done_bytes, left_bytes = 0, _LONG_WORDS_LIMIT_BYTES
    half_bytes = left_bytes // 2
    for number, located in enumerate(survey.located(), 1):
        done_bytes += len(located.piece.text)
        if not located.held_out and number % stride == 0:
            sizes_bytes = map(len, located.piece.text.split())
            left_bytes -= sum(size for size in sizes_bytes if size > _LONG_WORD_BYTES)
            while half_bytes and left_bytes < half_bytes:
                stride, half_bytes = 2 * stride, half_bytes // 2
            yield located.piece.text.decode("utf-8")
        if number % PROGRESS_EVERY_PIECES == 0:
            progress(done_bytes, survey.text_bytes, "learning tokens")
    progress(survey.text_bytes, survey.text_bytes, "learning tokens")


def _require_text(survey: Survey, named: list[Path], held_out: bool, skipped: Skipped) -> None:
    if named and not any(file.held_out == held_out for file in survey.files):
        raise UserError(
            f"no text found in {', '.join(map(str, named))} (skipped: {skipped})",
            (
                "name files or directories with UTF-8 text, JSON lines, Parquet or Arrow",
                "name the rows' text with --field, where there are rows",
            ),
        )


def _require_windows(reading: SecondReading, context: int, survey: Survey) -> None:
    for split, writer in (("training", reading.train), ("held-out", reading.held_out)):
        if writer.tokens <= context:
            more = "hold out more, such as --held-out 0.1"
            is_held_out = writer is reading.held_out
            raise UserError(
                f"too little text: {counted(writer.tokens, f'{split} token')} do not make one "
                f"window of {context + 1} (from {survey.text_bytes} bytes of text)",
                ("add text", "choose a smaller context", *([more] if is_held_out else [])),
            )


def _manifest(
    survey: Survey, reading: SecondReading, tokenizer: Tokenizer, store: BlobStore, notes: Notes
) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        token_type=token_type_for(tokenizer.vocabulary),
        tokenizer=entry_of(tokenizer, store),
        shards=reading.shards,
        totals=Totals(
            reading.train.tokens, reading.held_out.tokens, survey.documents, survey.text_bytes
        ),
        notes=notes,
        selection=survey.selection,
    )


def _require_readable(payload: bytes, shard_tokens: int) -> None:
    """Raises `UserError` for a manifest that peers would refuse: it must not leave this machine."""
    if len(payload) > MANIFEST_LIMIT_BYTES:
        raise UserError(
            f"{len(payload)} bytes of manifest, more than the limit of {MANIFEST_LIMIT_BYTES}",
            f"make shards larger than {counted(shard_tokens, 'token')}",
        )
    try:
        parse_manifest(payload)
    except PeerFault as error:
        raise AssertionError(f"the manifest just made is refused: {error}") from error

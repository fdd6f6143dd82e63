"""Second reading: tokens into shards."""

from collections.abc import Iterator

import msgspec
import numpy as np

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text
from p2p_dtfm.train.data.blob_store import BlobStore
from p2p_dtfm.train.data.first_reading import Located, Progress, Survey
from p2p_dtfm.train.data.manifest import ShardEntry, Split, token_type_for
from p2p_dtfm.train.data.tokenizer import Tokenizer
from p2p_dtfm.train.data.writing.journal import Journal, WrittenSoFar
from p2p_dtfm.train.data.writing.kept_shards import KeptShardWriter, NotAsLeft

_BATCH_PIECES = 1024
_BATCH_BYTES = 1 << 20
_UNNAMED_SHARDS = 64


class SecondReading:
    """Writes the shards of both splits."""

    def __init__(
        self, survey: Survey, tokenizer: Tokenizer, store: BlobStore, shard_tokens: int
    ) -> None:
        self._survey, self._tokenizer, self._store = survey, tokenizer, store
        token_type = token_type_for(tokenizer.vocabulary)
        self.train, self.held_out = (
            KeptShardWriter(store, split, token_type, shard_tokens)
            for split in ("train", "held_out")
        )

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        return (*self.train.entries, *self.held_out.entries)

    def write(self, journal: Journal, progress: Progress) -> None:
        """Write everything from where `journal` says; in the end journal and files say that all is
        written.

        Raises OSError for a disk that takes no more: the next command goes on from the newest
        journal. Raises `UserError` for text that is not what it was. Then nothing is gone on with:
        tokens that the journal tells of may be of the other text, and the files may be put back.
        """
        self._take_up(journal)
        try:
            place = journal.place
            for place in self._places(journal.place, progress):
                unnamed = max(self.train.unnamed, self.held_out.unnamed)
                if journal.is_due(place.text_bytes) or unnamed >= _UNNAMED_SHARDS:
                    self._keep(journal, place)
            for writer in (self.train, self.held_out):
                writer.close()
            self._keep(journal, place)
        except UserError:
            journal.remove()
            raise
        finally:
            for writer in (self.train, self.held_out):
                if journal.is_kept:
                    writer.leave()
                else:
                    writer.abandon()

    def _keep(self, journal: Journal, place: WrittenSoFar) -> None:
        train, held_out = self.train.state(), self.held_out.state()
        journal.save(msgspec.structs.replace(place, train=train, held_out=held_out))
        self.train.settle()
        self.held_out.settle()

    def _take_up(self, journal: Journal) -> None:
        """Have the shards that the journal tells of, and no others."""
        place = journal.place
        try:
            self.train.take_up(place.train)
            self.held_out.take_up(place.held_out)
            if place.file > len(self._survey.files):
                raise NotAsLeft("it tells of more files than there are")
        except NotAsLeft as error:
            for writer in (self.train, self.held_out):
                writer.drop()
            tokenizer = journal.tokenizer
            journal.begin_anew(str(error))
            if tokenizer is not None:
                journal.save(WrittenSoFar(), tokenizer)
        names = (writer.open_name for writer in (self.train, self.held_out))
        self._store.remove_temporary_files({name for name in names if name is not None})
        if journal.place.text_bytes:
            done, whole = bytes_text(journal.place.text_bytes), bytes_text(self._survey.text_bytes)
            journal.say(f"goes on where it was interrupted: {done} of {whole} of text are written")

    def _places(self, place: WrittenSoFar, progress: Progress) -> Iterator[WrittenSoFar]:
        """Write all pieces, and yield now and then how far this has got. Each document, or each
        stretch of it within a split, ends with a token for it. It begins with a token too, if the
        model's texts do."""
        separator = np.array([self._tokenizer.end_of_document])
        start = self._tokenizer.start_of_document
        beginning = np.array([] if start is None else [start], dtype=np.uint32)
        writers: dict[Split, KeptShardWriter] = {"train": self.train, "held_out": self.held_out}
        open_split, done_bytes = place.open_split, place.text_bytes
        for batch in _batches(self._survey.located(place.file, place.piece)):
            for located, tokens, before in self._encoded(batch, open_split):
                split = _split_of(located)
                if before is not None and before != split:
                    writers[before].append(separator)
                if before != split:
                    writers[split].append(beginning)
                writers[split].append(tokens)
                if located.piece.ends_document:
                    writers[split].append(separator)
                open_split = None if located.piece.ends_document else split
                done_bytes += len(located.piece.text)
            progress(done_bytes, self._survey.text_bytes, "writing")
            last = batch[-1]
            batch.clear()  # while the next one is read
            yield WrittenSoFar(last.file, last.number + 1, done_bytes, open_split)

    def _encoded(
        self, batch: list[Located], open_split: Split | None
    ) -> Iterator[tuple[Located, np.ndarray, Split | None]]:
        """Pieces, their tokens, and the split in which a document is open before each piece."""
        before = [open_split]
        for located in batch:
            before.append(None if located.piece.ends_document else _split_of(located))
        goes_on = [opened == _split_of(at) for at, opened in zip(batch, before, strict=False)]
        tokens = self._tokenizer.encode_batch([at.piece.text for at in batch], goes_on)
        return zip(batch, tokens, before, strict=False)


def _split_of(located: Located) -> Split:
    return "held_out" if located.held_out else "train"


def _batches(pieces: Iterator[Located]) -> Iterator[list[Located]]:
    """Pieces to encode at once; their number and size are bounded."""
    batch: list[Located] = []
    size_bytes = 0
    for located in pieces:
        batch.append(located)
        size_bytes += len(located.piece.text)
        if len(batch) >= _BATCH_PIECES or size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch

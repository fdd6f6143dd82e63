"""Conversations to shards whose tokens say of themselves whether they count.

A sequence of the run holds whole conversations, one after another, and is filled up behind them. No
conversation goes on in the next sequence. A shard stores twice each token's number, and one more if
the token counts. The tokens of answers count, and so does what ends them. The manifest says how
many tokens of each sequence count, so that all peers divide a step's gradients by the same number.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text
from p2p_dtfm.train.data.chat.conversations import Conversation, RowsLeftOut, read_conversations
from p2p_dtfm.train.data.chat.template import (
    ChatForm,
    ChatWriter,
    NotTheSame,
    RefusedByTemplate,
)
from p2p_dtfm.train.data.documents import LINES_OF_ARRAY
from p2p_dtfm.train.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_LIMIT_BYTES,
    Manifest,
    Notes,
    ShardEntry,
    Split,
    Totals,
    token_type_for,
)
from p2p_dtfm.train.data.prepare import (
    alone_with,
    finish,
    remove_unused,
    require_ours,
)
from p2p_dtfm.train.data.shard_files import ShardWriter
from p2p_dtfm.train.data.tokenizer import Tokenizer, ending_with, entry_of

SHARD_TOKENS = 1 << 20
_SPLITS: tuple[Split, ...] = ("train", "held_out")
_SALT = b"held out"
_EVERY_ROWS = 256

Row = tuple[np.ndarray, np.ndarray]
"""Tokens, and whether each counts."""


@dataclass
class ChatTotals:
    """What was prepared."""

    conversations: int = 0
    taken_apart: int = 0
    """Of these, conversations that were written once for each answer, because the template writes
    the last answer otherwise."""
    counted_tokens: int = 0
    left_out: RowsLeftOut = field(default_factory=RowsLeftOut)


def prepare_chat(
    paths: list[Path],
    out: Path,
    tokenizer: Tokenizer,
    form: ChatForm,
    *,
    context: int,
    held_out_fraction: float = 0.02,
    notes: Notes | None = None,
    progress: Callable[[int, int, str], None] = lambda done_bytes, total_bytes, stage: None,
) -> tuple[Manifest, ChatTotals]:
    """Make the directory `out` from JSON lines of conversations. Raises `UserError`."""
    replaces = require_ours(out)
    _require_sane(context, held_out_fraction)
    _require_known(form, tokenizer)
    writer, totals, window = ChatWriter(form, tokenizer), ChatTotals(), context + 1
    held_out_key = _held_out_key(paths, held_out_fraction)
    packing = {split: _Packed(window, writer.filling) for split in _SPLITS}
    total_bytes = sum(path.stat().st_size for path in paths)
    with alone_with(out, replaces) as store:
        store.remove_temporary_files()
        token_type = token_type_for(2 * tokenizer.vocabulary)
        shard_tokens = max(1, SHARD_TOKENS // window) * window
        shards = {
            split: _Shards(ShardWriter(store, split, token_type, shard_tokens), window)
            for split in packing
        }
        try:
            done_bytes = 0
            for number, (row, key, size_bytes) in enumerate(_rows(paths, writer, window, totals)):
                split: Split = "held_out" if key <= held_out_key else "train"
                shards[split].append(packing[split].add(row))
                done_bytes += size_bytes
                if number % _EVERY_ROWS == 0:
                    _require_countable(shards)
                    progress(min(done_bytes, total_bytes), total_bytes, "writing")
            for each in _SPLITS:
                shards[each].append(packing[each].rest())
                shards[each].writer.close()
        finally:
            for opened in shards.values():
                opened.writer.abandon()
        progress(total_bytes, total_bytes, "writing")
        _require_countable(shards)
        _require_both(shards, totals)
        totals.counted_tokens = sum(sum(made.counted) for made in shards.values())
        tokenizer = ending_with(tokenizer, writer.filling)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            token_type=token_type,
            tokenizer=entry_of(tokenizer, store),
            shards=(*shards["train"].entries(), *shards["held_out"].entries()),
            totals=Totals(
                shards["train"].writer.tokens,
                shards["held_out"].writer.tokens,
                totals.conversations,
                total_bytes,
            ),
            notes=notes or Notes("", "", ""),
            sequence_tokens=window,
        )
        finish(out, store, manifest, tokenizer, shard_tokens)
        remove_unused(store, manifest)  # also what was begun there and never finished
    return manifest, totals


def _require_sane(context: int, held_out_fraction: float) -> None:
    if context < 1:
        raise UserError(f"a context of {context} tokens", "choose the model's: --context 128")
    if not 0 < held_out_fraction <= 0.5:
        raise UserError(f"held-out fraction of {held_out_fraction}", "choose between 0 and 0.5")


def _require_known(form: ChatForm, tokenizer: Tokenizer) -> None:
    for name, token in form.special.items():
        if not 0 <= token < tokenizer.vocabulary:
            raise UserError(
                f"the control token {name[:40]!r} is token {token}, and the tokenizer has "
                f"{tokenizer.vocabulary}: it is that of another model",
                "leave out --tokenizer: --chat takes the tokenizer of its model",
            )


def _require_both(shards: "Mapping[Split, _Shards]", totals: ChatTotals) -> None:
    for each, purpose in zip(_SPLITS, ("to train on", "held out"), strict=True):
        if not shards[each].counted:
            raise UserError(
                f"no conversations {purpose} (left out: {totals.left_out})",
                ("name more conversations, or a larger --held-out", "choose a larger context"),
            )


def _require_countable(shards: "Mapping[Split, _Shards]") -> None:
    """Refuse more sequences than a manifest can say of how many of their tokens count."""
    if sum(made.counted_bytes for made in shards.values()) > MANIFEST_LIMIT_BYTES:
        sequences = sum(len(made.counted) for made in shards.values())
        raise UserError(
            f"{sequences:,} sequences or more: of so many a manifest cannot say how many of their "
            f"tokens count, in at most {bytes_text(MANIFEST_LIMIT_BYTES)}",
            ("choose a larger --context: a sequence holds more", "name fewer conversations"),
        )


def _rows(
    paths: list[Path], writer: ChatWriter, window: int, totals: ChatTotals
) -> Iterator[tuple[Row, int, int]]:
    """Each conversation as tokens, no longer than a sequence, with its key and the bytes of its
    line. Its first token never counts."""
    left_out = totals.left_out
    for conversation, line, where in read_conversations(paths, left_out):
        if writer.spells_out_control(conversation):
            left_out.with_control_tokens += 1
            continue
        try:
            written, apart = _written(writer, conversation)
        except RefusedByTemplate as error:
            left_out.note_refused(where, error.reason)
            continue
        cut = [row for each in written if (row := _cut(each, window, left_out)) is not None]
        totals.conversations += bool(cut)
        totals.taken_apart += bool(cut) and apart
        for row in cut:
            yield row, _key(conversation), len(line)
    if left_out.refused and not totals.conversations:
        raise RefusedByTemplate(f"it refuses every row ({'; '.join(left_out.refused_examples)})")


def _written(writer: ChatWriter, conversation: Conversation) -> tuple[list[Row], bool]:
    """Its rows, and whether it was taken apart into one for each answer. Raises `UserError`."""
    try:
        return [writer.tokens(conversation)], False
    except NotTheSame:
        return list(writer.each_answer(conversation)), True


def _cut(row: Row, window: int, left_out: RowsLeftOut) -> Row | None:
    """As much of the row as a sequence holds; None if none of that counts."""
    tokens, counts = row
    if len(tokens) > window:
        tokens, counts = tokens[:window], counts[:window]
        left_out.shortened += 1
    counts[:1] = False  # nothing of the same conversation comes before it
    if counts.any():
        return tokens, counts
    left_out.too_long += 1
    return None


class _Packed:
    """Conversations one after another, in sequences; none crosses into the next sequence."""

    def __init__(self, window: int, filling: int) -> None:
        self._window, self._filling = window, filling
        self._waiting: list[Row] = []
        self._length = 0

    def add(self, row: Row) -> list[np.ndarray]:
        """Adds a conversation; returns the sequence before it, filled up, if that has no room for
        it."""
        full = self.rest() if self._length + len(row[0]) > self._window else []
        self._waiting.append(row)
        self._length += len(row[0])
        return full

    def rest(self) -> list[np.ndarray]:
        """The sequence that has been begun, filled up."""
        if not self._waiting:
            return []
        values = [2 * tokens.astype(np.uint32) + counts for tokens, counts in self._waiting]
        filling = np.full(self._window - self._length, 2 * self._filling, dtype=np.uint32)
        self._waiting, self._length = [], 0
        return [np.concatenate([*values, filling])]


class _Shards:
    """The shards of one split."""

    def __init__(self, writer: ShardWriter, window: int) -> None:
        self.writer = writer
        self.counted: list[int] = []
        """How many tokens of each sequence count."""
        self.counted_bytes = 0
        """How much of a manifest these figures take."""
        self._window = window

    def append(self, sequences: Iterable[np.ndarray]) -> None:
        for sequence in sequences:
            self.writer.append(sequence)
            self.counted.append(int((sequence & 1).sum()))
            self.counted_bytes += len(f"{self.counted[-1]},")

    def entries(self) -> Iterator[ShardEntry]:
        first = 0
        for entry in self.writer.entries:
            end = first + entry.tokens // self._window
            counted = tuple(self.counted[first:end])
            yield ShardEntry(entry.digest, entry.tokens, entry.split, counted)
            first = end


def _key(conversation: Conversation) -> int:
    """A hash of what is said: rows that differ in other fields or in blanks are one
    conversation."""
    said = msgspec.json.encode(conversation)
    return int.from_bytes(hashlib.blake2b(said, digest_size=8, salt=_SALT).digest(), "little")


def _held_out_key(paths: list[Path], fraction: float) -> int:
    """First reading: the highest key that is held out. Equal conversations are on one side."""
    keys = [_key(conversation) for conversation, _, _ in read_conversations(paths, RowsLeftOut())]
    if not keys:
        raise UserError(
            f"no conversations in {', '.join(map(str, paths))}",
            (
                'each row holds {"messages": [...]}, {"conversations": [...]} as ShareGPT has it, '
                'or {"prompt": "...", "completion": "..."}',
                f"make lines of a JSON array: {LINES_OF_ARRAY}",
            ),
        )
    ordered = sorted(set(keys))
    return ordered[max(0, min(len(ordered) - 2, round(fraction * len(ordered)) - 1))]

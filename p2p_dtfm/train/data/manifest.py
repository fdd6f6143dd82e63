"""The manifest: what a prepared corpus consists of. Its digest names the data of a run.

Canonical JSON: keys sorted, no blanks. Only those very bytes are accepted, so that one manifest has
one digest. It holds no paths: where the founder keeps files is nobody's business.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault, UserError

Part = TypeVar("Part")
FORMAT_VERSION = 1
MANIFEST_LIMIT_BYTES = 16 << 20
SHARD_LIMIT_TOKENS = 1 << 28
TOKENIZER_LIMIT_BYTES = 64 << 20

_SHOWN_CHARACTERS = 200
_SHOWN_RULES = 8

Split = Literal["train", "held_out"]
TokenType = Literal["uint8", "uint16", "uint32"]
TOKEN_BYTES: dict[TokenType, int] = {"uint8": 1, "uint16": 2, "uint32": 4}

_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 60)]
_Text = Annotated[str, Meta(max_length=2000)]


class ShardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file of little-endian tokens, named by its BLAKE2b-256."""

    digest: _Digest
    tokens: Annotated[int, Meta(ge=1, le=SHARD_LIMIT_TOKENS)]
    split: Split
    counted: Annotated[tuple[_Count, ...], Meta(max_length=SHARD_LIMIT_TOKENS)] = ()
    """How many tokens of each sequence count; empty where all do."""


class TokenizerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokenizer file that made the tokens."""

    digest: _Digest
    size_bytes: Annotated[int, Meta(ge=1, le=TOKENIZER_LIMIT_BYTES)]
    vocabulary: Annotated[int, Meta(ge=2, le=1 << 24)]
    end_of_document: Annotated[int, Meta(ge=0, lt=1 << 24)] | msgspec.UnsetType = msgspec.UNSET
    """The token after each document. Unset: the token of the zero byte."""
    start_of_document: Annotated[int, Meta(ge=0, lt=1 << 24)] | msgspec.UnsetType = msgspec.UNSET
    """The token before each document. Unset: none, as in manifests from before this field."""


class Notes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What people should know about the text."""

    name: _Text
    licence: _Text
    source: _Text

    def describe(self) -> str:
        """One line for people. What the founder did not state is told as not stated."""
        name, licence, source = map(_one_line, (self.name, self.licence, self.source))
        return (
            f"data {name or 'without a name'}, licence {licence or 'not stated'}, "
            f"source {source or 'not stated'}"
        )


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over the corpus. `text_bytes` and `documents` count what was prepared."""

    train_tokens: _Count
    held_out_tokens: _Count
    documents: _Count
    text_bytes: _Count


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Documents that a rule has left out; one that fails several rules counts for the first."""

    rule: Annotated[str, Meta(max_length=2000)]
    documents: _Count


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The documents that were there, and how many of them each rule has left out."""

    documents: _Count
    """Documents before any were left out."""
    left_out: Annotated[tuple[LeftOut, ...], Meta(max_length=128)]

    def describe(self) -> str:
        """A line for people, of bounded length."""
        kept = self.documents - sum(each.documents for each in self.left_out)
        shown = [f"{each.documents:,} by {_one_line(each.rule)}" for each in self.left_out]
        more = ", ..." if len(shown) > _SHOWN_RULES else ""
        return (
            f"{kept:,} of {self.documents:,} documents kept; left out: "
            f"{', '.join(shown[:_SHOWN_RULES]) or 'none'}{more}"
        )


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Shards of a split are in corpus order; the order decides which sample is which."""

    format_version: int
    token_type: TokenType
    tokenizer: TokenizerEntry
    shards: Annotated[tuple[ShardEntry, ...], Meta(min_length=1, max_length=1 << 17)]
    totals: Totals
    notes: Notes
    selection: Selection | msgspec.UnsetType = msgspec.UNSET
    """Unset where all documents were taken, as in manifests from before this field."""
    sequence_tokens: Annotated[int, Meta(ge=0, le=SHARD_LIMIT_TOKENS)] = 0
    """Tokens in a sequence, its last target included, where tokens say themselves whether they
    count. Each is then stored as twice its number, and one more if it counts. 0: all count."""

    def describe(self) -> str:
        """One line for people who may take part."""
        if isinstance(self.selection, Selection):
            return f"{self.notes.describe()}; {self.selection.describe()}"
        return self.notes.describe()

    def to_bytes(self) -> bytes:
        """The canonical JSON."""
        return msgspec.json.encode(self, order="sorted")

    def digest(self) -> str:
        return digest_bytes(self.to_bytes())

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocabulary

    @property
    def stored_values(self) -> int:
        """The bound of the numbers in shards: all are below it."""
        return 2 * self.vocabulary if self.sequence_tokens else self.vocabulary

    def shards_in(self, split: Split) -> tuple[ShardEntry, ...]:
        return tuple(shard for shard in self.shards if shard.split == split)

    def size_bytes(self, shard: ShardEntry) -> int:
        """Size of a shard's file."""
        return shard.tokens * TOKEN_BYTES[self.token_type]

    def blobs(self) -> dict[str, int]:
        """Every file that the manifest names: its digest, and its size in bytes."""
        sizes = {shard.digest: self.size_bytes(shard) for shard in self.shards}
        return sizes | {self.tokenizer.digest: self.tokenizer.size_bytes}


def _one_line(text: str) -> str:
    """A stranger's text, made safe for a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)[:_SHOWN_CHARACTERS]


def token_type_for(vocabulary: int) -> TokenType:
    """The narrowest unsigned type that holds every token."""
    if vocabulary <= 1 << 8:
        return "uint8"
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def parse_manifest(payload: bytes, expected_digest: str | None = None) -> Manifest:
    """Read a manifest that a peer sent. Raises `PeerFault` for anything else."""
    if len(payload) > MANIFEST_LIMIT_BYTES:
        raise PeerFault(f"manifest of {len(payload)} bytes, limit {MANIFEST_LIMIT_BYTES}")
    if expected_digest is not None and digest_bytes(payload) != expected_digest:
        raise PeerFault(f"manifest that does not hash to {expected_digest[:12]}")
    try:
        manifest = msgspec.json.decode(payload, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise PeerFault(f"not a manifest: {error}") from error
    problem = _inconsistency(manifest)
    if problem is None and manifest.to_bytes() != payload:
        problem = "is not in canonical form"
    if problem is not None:
        raise PeerFault(f"manifest that {problem}")
    return manifest


def load_manifest(path: Path) -> Manifest:
    """Read the manifest of a prepared directory. Raises `UserError`."""
    place = shlex.quote(str(path.parent))
    fix = f"make the data anew: p2p-dtfm prepare PATH... --out {place} --overwrite"
    return load_part(path, str(path), MANIFEST_LIMIT_BYTES, parse_manifest, fix)


def load_part(
    path: Path, name: str, limit_bytes: int, parse: Callable[[bytes], Part], fix: str
) -> Part:
    """Read one of a prepared directory's files, on the user's own disk. Raises `UserError`."""
    try:
        with open(path, "rb") as file:
            payload = file.read(limit_bytes + 1)
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}", fix) from error
    try:
        return parse(payload)
    except PeerFault as error:
        raise UserError(f"{path} cannot be used: {error.cause}", fix) from error


def _inconsistency(manifest: Manifest) -> str | None:
    """What is wrong between the fields, where each of them is within its own bounds."""
    if manifest.format_version != FORMAT_VERSION:
        return f"has format {manifest.format_version}, this version reads {FORMAT_VERSION}"
    if problem := _inconsistent_tokens(manifest):
        return problem
    train = sum(shard.tokens for shard in manifest.shards_in("train"))
    held_out = sum(shard.tokens for shard in manifest.shards_in("held_out"))
    if (train, held_out) != (manifest.totals.train_tokens, manifest.totals.held_out_tokens):
        return "has totals that are not the sums of its shards"
    if isinstance(manifest.selection, Selection):
        left_out = sum(each.documents for each in manifest.selection.left_out)
        if manifest.selection.documents < left_out:
            return "leaves out more documents than there were"
    if any(_miscounts(shard, manifest.sequence_tokens) for shard in manifest.shards):
        return "counts tokens of sequences that its shards do not hold"
    sizes: dict[str, int] = {}
    for shard in manifest.shards:
        if sizes.setdefault(shard.digest, shard.tokens) != shard.tokens:
            return f"gives shard {shard.digest[:12]} two sizes"
    if manifest.tokenizer.digest in sizes:
        return "names one file as tokenizer and as shard"
    return None


def _inconsistent_tokens(manifest: Manifest) -> str | None:
    if manifest.token_type != token_type_for(manifest.stored_values):
        return f"stores a vocabulary of {manifest.vocabulary} as {manifest.token_type}"
    end = manifest.tokenizer.end_of_document
    if isinstance(end, int) and end >= manifest.vocabulary:
        return f"ends documents with token {end} of {manifest.vocabulary}"
    start = manifest.tokenizer.start_of_document
    if isinstance(start, int) and start >= manifest.vocabulary:
        return f"begins documents with token {start} of {manifest.vocabulary}"
    return None


def _miscounts(shard: ShardEntry, sequence_tokens: int) -> bool:
    if not sequence_tokens:
        return bool(shard.counted)
    whole = shard.tokens == sequence_tokens * len(shard.counted)
    return not whole or not all(0 < count < sequence_tokens for count in shard.counted)

"""What a model's directory says besides its weights, as one small file that travels with a run.

A run knows a tokenizer's plain part only. Special tokens, the chat template and how to generate are
the model's own, and an exported model needs them again. `import` packs them into a JSON file. Its
hash is in initial.json, and so covered by the run's digest. Its largest part, a tokenizer's
vocabulary, is left out: the run has it, and `unpack` puts it back.

Like all of a run it may come from a stranger. So it holds text and JSON only, under names from a
list, and nothing that names code.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.data.blob_store import BlobStore
from p2p_dtfm.train.data.byte_pairs import KNOWN_PATTERNS
from p2p_dtfm.train.data.chat.template import TEMPLATE_NAME
from p2p_dtfm.train.data.manifest import TOKENIZER_LIMIT_BYTES
from p2p_dtfm.train.data.prepare import TOKENIZER_NAME
from p2p_dtfm.train.data.tokenizer import ByteTokenizer, Tokenizer
from p2p_dtfm.train.hugging_face.configuration import CONFIGURATION_NAME
from p2p_dtfm.train.model.initial_state import ORIGIN_LIMIT_BYTES, InitialFile, parse_initial

TRAVELLING = (
    CONFIGURATION_NAME,
    "generation_config.json",
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_NAME,
)
"""Files that travel. vocab.json, merges.txt and tokenizer.model are not among them: they repeat
what tokenizer.json says."""
_LEFT_OUT = {
    "auto_map",  # programs of the model's directory, which transformers may run
    "_name_or_path",  # from here on: where the founder keeps files, nobody's business
    "name_or_path",
    "tokenizer_file",
    "special_tokens_map_file",
    "vocab_file",
    "merges_file",
}
"""Names that are left out of all tables."""
_READ_AS_SUCH = (CONFIGURATION_NAME, TOKENIZER_NAME)
"""What `import` refuses if it is not the model's: these are no other files of the founder's. The
tokenizer is in the run anyway, and a program of the hub's once left it in its cache, as a link."""


class OriginFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    format: int
    tokenizer: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    """The hash of the plain tokenizer to whose numbers the files refer."""
    files: Annotated[dict[str, str], Meta(max_length=len(TRAVELLING))]


def pack(directory: Path, tokenizer: Tokenizer) -> bytes | None:
    """The file; None if it would be too large. `tokenizer`: the plain one, as it was read from
    there. Files that are not what their names say are left out, and so are links that lead out of
    the directory. Raises OSError."""
    files = {}
    for name in TRAVELLING:
        path = directory / name
        if not lies_in(directory, name) or path.stat().st_size > TOKENIZER_LIMIT_BYTES:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
            if name == TOKENIZER_NAME and not isinstance(tokenizer, ByteTokenizer):
                text = _written(_without_vocabulary(json.loads(text)))
            files[name] = _checked(name, text)
        except (ValueError, PeerFault):
            continue
    origin = OriginFiles(1, digest_bytes(tokenizer.to_bytes()), files)
    payload = msgspec.json.encode(origin, order="sorted")
    return payload if len(payload) <= ORIGIN_LIMIT_BYTES else None


def lies_in(directory: Path, name: str) -> bool:
    """Whether a model's own file is there, and is one of its own. A directory from elsewhere may
    hold a link to any file of this user, who would give it to all members. The links of the hub's
    cache lead from `snapshots/REVISION` to `blobs` beside it."""
    path = directory / name
    if not path.is_file() or name in _READ_AS_SUCH:
        return path.is_file()
    folder, found = directory.resolve(), path.resolve()
    is_cache = folder.parent.name == "snapshots"
    return found.parent == folder or (is_cache and found.parent == folder.parent.parent / "blobs")


def unpack(payload: bytes, tokenizer: Tokenizer, folder: Path) -> bool:
    """Write the files into `folder`. Writes nothing and returns False if they belong to another
    tokenizer. Raises `PeerFault` before anything is written, and OSError."""
    if len(payload) > ORIGIN_LIMIT_BYTES:
        raise PeerFault(f"{len(payload)} bytes of a model's own files, limit {ORIGIN_LIMIT_BYTES}")
    try:
        packed = msgspec.json.decode(payload, type=OriginFiles)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise PeerFault(f"not a model's own files: {error}") from error
    if packed.format != 1:
        raise PeerFault(f"a model's own files of format {packed.format}, this version reads 1")
    unknown = [name for name in packed.files if name not in TRAVELLING]
    if unknown:
        raise PeerFault(f"a model's own file of the name {unknown[0][:60]!r}")
    plain = tokenizer.to_bytes()
    texts = {name: _checked(name, text) for name, text in packed.files.items()}
    if digest_bytes(plain) != packed.tokenizer:
        return False
    if TOKENIZER_NAME in texts and not isinstance(tokenizer, ByteTokenizer):
        content = _with_vocabulary(json.loads(texts[TOKENIZER_NAME]), json.loads(plain))
        texts[TOKENIZER_NAME] = _written(content, indent=2)
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode("utf-8"))
    return True


def travelled(blobs: BlobStore, spec: RunSpec) -> bytes | None:
    """The run's file, from a member's home; None where the home has none. Raises `PeerFault`."""
    path = blobs.path(spec.model.initial) if spec.model.initial else None
    origin = None if path is None else parse_initial(path.read_bytes(), spec).origin
    if not isinstance(origin, InitialFile) or not blobs.verify(origin.digest):
        return None
    return blobs.held(origin.digest).read_bytes()


def _checked(name: str, text: str) -> str:
    """The text without what must not travel. Raises `PeerFault` for no JSON, or a template of no
    text."""
    if "\0" in text:
        raise PeerFault(f"{name} with zero bytes")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PeerFault(f"{name} that is no text") from error
    if not name.endswith(".json"):
        return text
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerFault(f"{name} that is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PeerFault(f"{name} that is no table")
    if name == TOKENIZER_NAME and not _patterns_in(content) <= KNOWN_PATTERNS.keys():
        raise PeerFault(f"{name} with a pattern of its own, which may take for ever")
    if not _LEFT_OUT & set(content):
        return text
    kept = {name: value for name, value in content.items() if name not in _LEFT_OUT}
    return _written(kept, indent=2)


def _patterns_in(content: dict[str, Any]) -> set[str]:
    """The regular expressions in a tokenizer.json, at whatever depth."""
    found: set[str] = set()
    pending: list[Any] = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pattern = value.get("Regex")
            found |= {pattern} if isinstance(pattern, str) else set()
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return found


def _written(content: dict[str, Any], indent: int | None = None) -> str:
    """JSON with letters as they are, as far as they are text: half a character, which JSON may
    name, stays named. Raises `PeerFault` for a table nested too deeply to be written: from Python
    3.12 on, more levels can be read than written."""
    try:
        text = json.dumps(content, indent=indent, ensure_ascii=False)
    except RecursionError as error:
        raise PeerFault("a model's own file that is nested too deeply") from error
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _without_vocabulary(content: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without its vocabulary. Control tokens that are in it stay, since the plain
    tokenizer may spell them otherwise."""
    model = content["model"]
    known = model.get("vocab") or {}
    kept = {
        added["content"]: added["id"]
        for added in content.get("added_tokens") or ()
        if known.get(added["content"]) == added["id"]
    }
    return {**content, "model": {**model, "vocab": kept, "merges": []}}


def _with_vocabulary(content: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer with the plain one's vocabulary. Raises `PeerFault` if the two do not fit."""
    try:
        control = {added["id"] for added in content.get("added_tokens") or ()}
        model = content["model"]
        pieces = {
            piece: token for piece, token in plain["model"]["vocab"].items() if token not in control
        }
        vocabulary = dict(sorted({**pieces, **model["vocab"]}.items(), key=lambda item: item[1]))
        model = {**model, "vocab": vocabulary, "merges": plain["model"]["merges"]}
    except (AttributeError, KeyError, TypeError) as error:
        raise PeerFault(f"{TOKENIZER_NAME} that is not one of a model: {error}") from error
    return {**content, "model": model}

"""Tokenizers as standard tokenizer.json files, and other people's files made into our tokenizers.

Our byte-pair tokenizers are such files already. The tokenizer of bytes becomes a byte-pair encoding
of 256 symbols without a merge, which gives the same tokens.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as StandardTokenizer
from tokenizers import decoders, models, pre_tokenizers

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.train.data.byte_pairs import SYMBOLS, spelt_in_symbols
from p2p_dtfm.train.data.manifest import TOKENIZER_LIMIT_BYTES
from p2p_dtfm.train.data.prepare import TOKENIZER_NAME
from p2p_dtfm.train.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    ending_with,
    starting_with,
    tokenizer_from_bytes,
)

ORIGIN_NAME = "origin"
"""Where `import` keeps the model's own files, beside the tokenizer as this program reads it."""


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """The tokenizer as a file that `tokenizers` and `transformers` load. These put the token before
    documents before each text."""
    if not isinstance(tokenizer, ByteTokenizer):
        return _with_start(tokenizer.to_bytes(), tokenizer.start_of_document)
    standard = StandardTokenizer(models.BPE(vocab=dict(SYMBOLS), merges=[]))
    standard.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    standard.decoder = decoders.ByteLevel()
    return standard.to_str().encode("utf-8")


def _with_start(plain: bytes, start: int | None) -> bytes:
    if start is None:
        return plain
    content = json.loads(plain)
    piece = next(it for it, token in content["model"]["vocab"].items() if token == start)
    first = {"SpecialToken": {"id": piece, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {piece: {"id": piece, "ids": [start], "tokens": [piece]}},
    }
    return json.dumps(content).encode("utf-8")


def start_of_texts(content: Mapping[str, Any]) -> int | None:
    """The token that a tokenizer.json puts before each text, as Llama's does; None if it is not
    one."""
    after = content.get("post_processor")
    listed = after.get("processors") if isinstance(after, dict) else None
    for step in [after, *(listed if isinstance(listed, list) else ())]:
        try:
            special = step["single"][0]["SpecialToken"]["id"]
            (found,) = step["special_tokens"][special]["ids"]
        except (LookupError, TypeError, ValueError):  # it puts none there, or is malformed
            continue
        return found if isinstance(found, int) else None
    return None


def read_tokenizer_json(path: Path) -> Tokenizer:
    """A BPE from elsewhere, given as a file or its directory, without its special tokens. Raises
    `UserError`.

    Special tokens, such as GPT-2's <|endoftext|>, keep their numbers but are never produced: a text
    that spells one out is a text like any other. Documents end with the token that ends the model's
    texts, as other files beside it say. They begin with the token that the file puts before texts.
    """
    path = _file_of(path)
    tokenizer = _read(path)
    files = [path]
    if path.name == TOKENIZER_NAME:  # a file of another name was not made from the origin
        files.append(path.parent / ORIGIN_NAME / TOKENIZER_NAME)
    known = range(tokenizer.vocabulary)
    contents = {file: json_of(file) for file in files}
    ends = (_end_of_text(content, file.parent) for file, content in contents.items())
    starts = map(start_of_texts, contents.values())
    tokenizer = starting_with(tokenizer, next((start for start in starts if start in known), None))
    end = next((end for end in ends if end in known), None)
    return tokenizer if end is None else ending_with(tokenizer, end)


def _end_of_text(content: Mapping[str, Any], directory: Path) -> int | None:
    """The token with which a model ends its texts. None unless the files beside its tokenizer say
    it, and the tokenizer knows it as more than plain text."""
    listed = content.get("added_tokens")
    added = {
        str(each.get("content")): each.get("id")
        for each in (listed if isinstance(listed, list) else ())
        if isinstance(each, dict)
    }
    stated = json_of(directory / "tokenizer_config.json").get("eos_token")
    piece = stated.get("content") if isinstance(stated, dict) else stated
    model = content.get("model")
    known = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(piece, str):
        found = added.get(piece, known.get(piece) if isinstance(known, dict) else None)
        return found if isinstance(found, int) else None
    for name in ("config.json", "generation_config.json"):
        stated = json_of(directory / name).get("eos_token_id")
        first = stated[0] if isinstance(stated, list) and stated else stated
        if isinstance(first, int) and first in added.values():
            return first
    return None


def _file_of(path: Path) -> Path:
    """The tokenizer's file, given as that or as its directory."""
    return path / TOKENIZER_NAME if path.is_dir() else path


def control_tokens_file(path: Path) -> Path:
    """The file that names the control tokens of a tokenizer, given as a file or its directory.
    Beside what `import` wrote that is the model's own."""
    path = _file_of(path)
    own = path.parent / ORIGIN_NAME / TOKENIZER_NAME
    return own if path.name == TOKENIZER_NAME and own.is_file() else path


def require_control_tokens_of(path: Path, chat: Path, special: Mapping[str, int]) -> None:
    """Raises `UserError` if the tokenizer gives these numbers to other tokens: then it belongs to
    another model than the directory `chat`."""
    path = _file_of(path)
    content = json_of(path)
    model, listed = content.get("model"), content.get("added_tokens")
    known = model.get("vocab") if isinstance(model, dict) else None
    named = {token: piece for piece, token in known.items()} if isinstance(known, dict) else {}
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict):
            named[each.get("id")] = each.get("content")
    for name, token in special.items():
        found = str(named.get(token, name))
        if found != name and not found.startswith(spelt_in_symbols(name)):
            raise UserError(
                f"the control token {name[:40]!r} of {chat} is token {token}, and in {path} that "
                f"is {found[:40]!r}",
                "leave out --tokenizer: --chat takes the tokenizer of its model",
            )


def json_of(path: Path) -> dict[str, Any]:
    """The table in a file; empty if there is none that can be read. It is only asked for tokens."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(TOKENIZER_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _read(path: Path) -> Tokenizer:
    fix = (
        "import a model whose tokenizer.json is a BPE like that of GPT-2, SmolLM, Llama or Qwen; "
        "or remove the file and prepare the data with another"
    )
    try:
        with path.open("rb") as file:
            payload = file.read(TOKENIZER_LIMIT_BYTES + 1)
        content = json.loads(payload[:TOKENIZER_LIMIT_BYTES])
        if isinstance(content, dict) and "kind" in content:
            return tokenizer_from_bytes(payload)  # ours, of bytes
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise ValueError("it is not the file of a tokenizer")
        return tokenizer_from_bytes(_plain(content))
    except (AttributeError, TypeError) as error:  # a list where a table should be, and the like
        raise UserError(f"{path} is not the file of a tokenizer: {error}", fix) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}", fix) from error
    except PeerFault as error:
        raise UserError(f"{path} cannot be used: {error.cause}", fix) from error


def _add(vocabulary: dict[str, Any], text: str, token: Any) -> None:
    """Add a token that no text turns into. It is spelt in symbols of bytes, as all others are. If a
    token of plain text is spelt like this already, zero bytes behind it make it another."""
    spelt = spelt_in_symbols(text)
    if vocabulary.get(text, token) != token:
        return  # numbered twice: refused
    if spelt != text:
        vocabulary.pop(text, None)
    while vocabulary.get(spelt, token) != token:
        spelt += spelt_in_symbols("\0")
    vocabulary[spelt] = token


def _add_piece(vocabulary: dict[str, Any], text: str, token: Any) -> None:
    """The same for a tokenizer whose tokens are spelt as they are. There only a single character is
    made of a text without a merge."""
    if vocabulary.get(text, token) != token:
        return  # numbered twice: refused
    if text not in vocabulary and len(text) == 1:
        text += "\0"
    vocabulary[text] = token


def _is_of_bytes(content: dict[str, Any]) -> bool:
    """Whether all that it makes of a text are symbols of its bytes."""
    model, between = content["model"], content.get("pre_tokenizer")
    if not isinstance(between, dict) or between.get("type") != "ByteLevel":
        return False
    joins = model.get("merges") or model.get("ignore_merges")
    return not (between.get("add_prefix_space", True) or joins)


def _has_more_than_bytes(content: dict[str, Any]) -> bool:
    """Whether there are tokens beside those of the bytes, or texts are changed before."""
    added = (each.get("id") for each in content.get("added_tokens") or ())
    return content.get("normalizer") is not None or any(it not in range(256) for it in added)


def _with_added(content: dict[str, Any]) -> dict[str, Any]:
    """The vocabulary, with the tokens that were added to it."""
    vocabulary = dict(content["model"].get("vocab") or {})
    add = _add_piece if content["model"].get("byte_fallback") else _add
    for added in content.get("added_tokens") or ():
        if not isinstance(text := added.get("content"), str):
            raise PeerFault("an added token without a text")
        add(vocabulary, text, added.get("id"))
    return vocabulary


def _plain(content: dict[str, Any]) -> bytes:
    """The file without what our tokenizers do not have, if that changes no token of plain text."""
    model = dict(content["model"])
    kind = model.get("type", "BPE")  # the oldest files do not say it
    if kind != "BPE":
        raise PeerFault(f"a tokenizer of kind {str(kind)[:40]}, and only BPE can be read")
    model["type"] = kind
    if _is_of_bytes(content):
        if model.get("vocab") == SYMBOLS and not _has_more_than_bytes(content):
            return ByteTokenizer().to_bytes()
        # nothing is merged, so it makes no difference how words are split
        content = {**content, "pre_tokenizer": {**content["pre_tokenizer"], "use_regex": True}}
    model["vocab"] = _with_added(content)
    model["merges"] = [
        merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()
    ]
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        model[name] = model.get(name) or None
    plain = {
        **content,
        "model": model,
        "added_tokens": [],
        "truncation": None,
        "padding": None,
        "post_processor": None,  # only moves offsets, or puts special tokens around a text
    }
    return json.dumps(plain).encode("utf-8")

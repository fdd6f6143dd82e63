"""Tokenizers as standard tokenizer.json files, and those of others made ours.

Our byte-pair tokenizers are such files already. Bytes become a byte-pair encoding of 256 symbols
without a merge, which gives the same tokens.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as StandardTokenizer
from tokenizers import decoders, models, pre_tokenizers

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.train.data.byte_pairs import SYMBOLS
from p2p_dtfm.train.data.manifest import TOKENIZER_LIMIT_BYTES
from p2p_dtfm.train.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_from_bytes


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """The tokenizer as a file that `tokenizers` and `transformers` load."""
    if not isinstance(tokenizer, ByteTokenizer):
        return tokenizer.to_bytes()
    standard = StandardTokenizer(models.BPE(vocab=dict(SYMBOLS), merges=[]))
    standard.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    standard.decoder = decoders.ByteLevel()
    return standard.to_str().encode("utf-8")


def read_tokenizer_json(path: Path) -> Tokenizer:
    """A byte-level BPE from elsewhere, without its special tokens. Raises `UserError`.

    Special tokens, such as GPT-2's <|endoftext|>, keep their numbers but are never produced: a
    text that spells one out is a text like any other.
    """
    fix = (
        "import a model whose tokenizer.json is a byte-level BPE that splits words as GPT-2's, "
        "Llama 3's or Qwen's does; or remove the file and prepare the data with another"
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


def _plain(content: dict[str, Any]) -> bytes:
    """Without what our tokenizers do not have, where that changes no token of plain text."""
    model = dict(content["model"])
    if model.get("vocab") == SYMBOLS and not model.get("merges"):
        return ByteTokenizer().to_bytes()
    vocabulary = dict(model.get("vocab") or {})
    for added in content.get("added_tokens") or ():
        vocabulary.setdefault(str(added.get("content")), added.get("id"))
    model["vocab"] = vocabulary
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
        "post_processor": None,  # moves offsets, or puts special tokens around a text
    }
    return json.dumps(plain).encode("utf-8")

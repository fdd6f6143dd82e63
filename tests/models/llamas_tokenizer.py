"""Tokenizers like those of Llama 1 and 2 and TinyLlama, learnt here from a few lines."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SPACE = "\u2581"
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LEARNT = (
    "the quick brown fox jumps over the lazy dog and then  the dog jumps, too.\n\n"
    "def walk(tree, depth=0):\n    return [walk(each, depth + 1) for each in tree]\n"
    "na\u00efve caf\u00e9 \u00fcber; 1234 and 12.5% of 2024\n\tif x == y: pass  # why not?\n"
)
BEFORE = {
    "prepend": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        ],
    },
}
SCHEMES = ["prepend", "first", "always", "never"]


@cache
def _learnt(size: int) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """The pieces in order, and all pairs that spell them, as converters write a SentencePiece
    model."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
    inner.train_from_iterator([LEARNT] * 20, trainer)
    content = json.loads(inner.to_str())["model"]
    made = [left + right for left, right in content["merges"]]
    single = [piece for piece in content["vocab"] if piece not in made and len(piece) == 1]
    pieces = [*SPECIAL, *BYTES, *dict.fromkeys(made), *single]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in dict.fromkeys(made)
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return vocabulary, tuple(merges)


def llamas_tokenizer(scheme: str = "prepend", size: int = 200) -> dict[str, Any]:
    """The content of the tokenizer's tokenizer.json."""
    vocabulary, merges = _learnt(size)
    between = {
        "type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False,
    }  # fmt: skip
    decoding: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if scheme != "never":
        decoding.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": content, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
            for token, content in enumerate(SPECIAL)
        ],
        "normalizer": BEFORE.get(scheme),
        "pre_tokenizer": None if scheme in BEFORE else between,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": decoding},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>",
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
            "byte_fallback": True, "ignore_merges": False,
            "vocab": dict(vocabulary), "merges": [" ".join(pair) for pair in merges],
        },
    }  # fmt: skip


def save_tokenizer(directory: Path, scheme: str = "prepend", **configuration: Any) -> Path:
    """Save the tokenizer as such models come: a tokenizer_config.json names what ends a text."""
    directory.mkdir(exist_ok=True)
    content = json.dumps(llamas_tokenizer(scheme), ensure_ascii=False)
    (directory / "tokenizer.json").write_text(content, encoding="utf-8")
    stated = {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "tokenizer_class": "LlamaTokenizer", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(stated | configuration))
    return directory

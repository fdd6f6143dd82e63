"""Text to tokens and back, and tokenizer files from strangers."""

import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_examples import make_text
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.train.data import ByteTokenizer, load_tokenizer, prepare, tokenizer_from_bytes
from p2p_dtfm.train.data.byte_pairs import BytePairTokenizer

PAIRS = BytePairTokenizer.train(iter([make_text(20_000)]), 350)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    for tokenizer in (ByteTokenizer(), PAIRS):
        tokens = tokenizer.encode(text)
        assert tokens.ndim == 1 and all(0 <= token < tokenizer.vocabulary for token in tokens)
        if text.encode("utf-8", errors="replace").decode() == text:
            assert tokenizer.decode(tokens) == text


@given(st.binary())
def test_any_bytes_can_be_encoded(payload: bytes) -> None:
    assert ByteTokenizer().encode_bytes(payload).tobytes() == payload
    assert PAIRS.decode(PAIRS.encode_bytes(payload)) == payload.decode("utf-8", "replace")


@given(st.lists(st.integers(-5, 400)))
def test_any_tokens_can_be_decoded(tokens: list[int]) -> None:
    for tokenizer in (ByteTokenizer(), PAIRS):
        assert isinstance(tokenizer.decode(tokens), str)


def test_tokens_outside_the_vocabulary_show() -> None:
    assert ByteTokenizer().decode([97, 256, -1, 98]) == "a\ufffd\ufffdb"
    assert PAIRS.decode([PAIRS.vocabulary]) == "\ufffd"


def test_pairs_shorten_text_and_keep_the_document_end_apart() -> None:
    text = make_text(5000, seed=3)
    assert len(PAIRS.encode(text)) < len(text.encode()) / 3
    assert len(PAIRS.encode("\0")) == 1
    assert PAIRS.encode("<|endoftext|>").size > 1, "nothing in a text is a command"


def test_where_no_spaces_are_written_tokens_are_learnt_from_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library took 32 GB of memory for the 256 MiB that it learnt from."""
    chance = random.Random(1)
    signs = [chr(0x4E00 + number) for number in range(3000)]
    sentences = ["".join(chance.choices(signs, k=40)) + "\n" for _ in range(3000)]
    (tmp_path / "text").write_text("".join(sentences), encoding="utf-8")
    (tmp_path / "spaced").write_text("".join(sentences).replace("", " "), encoding="utf-8")
    learnt: list[str] = []
    train = BytePairTokenizer.train

    def noted(texts: Iterator[str], vocabulary: int) -> BytePairTokenizer:
        learnt[:] = texts
        return train(iter(learnt), vocabulary)

    monkeypatch.setattr(BytePairTokenizer, "train", noted)
    module = importlib.import_module("p2p_dtfm.train.data.prepare")  # a function has its name, too
    monkeypatch.setattr(module, "_LONG_WORDS_LIMIT_BYTES", 1 << 16)
    prepare([tmp_path / "spaced"], tmp_path / "all", vocabulary=300)
    assert sum(len(text.encode()) for text in learnt) > 400_000
    prepare([tmp_path / "text"], tmp_path / "less", vocabulary=300)
    assert 1 << 15 < sum(len(text.encode()) for text in learnt) < 5 << 14
    whole = "".join(sentences)
    assert whole.index(learnt[-1]) > len(whole) / 2, "not of the beginning alone"


def test_training_is_deterministic() -> None:
    again = BytePairTokenizer.train(iter([make_text(20_000)]), 350)
    assert again.to_bytes() == PAIRS.to_bytes()


def test_too_little_text_gives_a_smaller_vocabulary() -> None:
    assert 256 <= BytePairTokenizer.train(iter(["abc"]), 5000).vocabulary < 300


def test_files_come_back(tmp_path: Path) -> None:
    for tokenizer in (ByteTokenizer(), PAIRS):
        path = tmp_path / "tokenizer.json"
        path.write_bytes(tokenizer.to_bytes())
        loaded = load_tokenizer(path)
        assert loaded.to_bytes() == tokenizer.to_bytes()
        assert loaded.vocabulary == tokenizer.vocabulary
        text = make_text(500, seed=5)
        assert list(loaded.encode(text)) == list(tokenizer.encode(text))


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be used"):
        load_tokenizer(tmp_path / "tokenizer.json")


def changed(**changes: object) -> bytes:
    file = json.loads(PAIRS.to_bytes())
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = file
        for parent in parents:
            section = section[parent]
        section[key] = value
    return json.dumps(file).encode()


VOCABULARY = json.loads(PAIRS.to_bytes())["model"]["vocab"]
LETTER = min(VOCABULARY, key=VOCABULARY.get)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"kind":"python","code":"import os"}',
        b'{"kind":"bytes" }',
        b'{"model":{"type":"WordLevel"}}',
        changed(model__type="Unigram"),
        changed(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}}),
        changed(pre_tokenizer__add_prefix_space=True),
        changed(normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}),
        changed(added_tokens=[{"id": 0, "content": "a", "special": True}]),
        changed(post_processor={"type": "TemplateProcessing"}),
        changed(model__dropout=0.5),
        changed(model__byte_fallback=True),
        changed(model__vocab={}),
        changed(model__vocab={**VOCABULARY, LETTER: 10**9}),
        changed(model__vocab={**VOCABULARY, "with blank": len(VOCABULARY)}),
        changed(
            model__vocab={
                ("zzzz" if piece == LETTER else piece): token for piece, token in VOCABULARY.items()
            }
        ),
        changed(model__merges=[["z", "zzzzzz"]]),
        changed(model__merges=[["a"]]),
    ],
)
def test_a_tokenizer_from_a_stranger(payload: bytes) -> None:
    with pytest.raises(PeerFault):
        tokenizer_from_bytes(payload)

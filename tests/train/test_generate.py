"""Text from checkpoints is repeatable and comes in whole characters."""

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.train.data.byte_pairs import BytePairTokenizer
from p2p_dtfm.train.model.block import Block
from p2p_dtfm.train.model.checkpoint import load_layer
from p2p_dtfm.train.model.generate import (
    _Continuation,
    _draw,
    _whole_characters,
    generate,
    load_model,
    spare_processors,
    stream,
    stream_until,
    whole_checkpoint,
)
from p2p_dtfm.train.model.gpt import told_beside
from p2p_dtfm.train.model.layer_state import LayerState
from tests.train.saved_layers import save_layers


class Bytes:
    vocabulary = 256
    end_of_document = 0
    start_of_document: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    decode_on = decode


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, spec: RunSpec) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    values = spec.model_dump()
    values["model"] = {**values["model"], "vocabulary": 300}
    wide = parse_run_spec(values, "test")
    save_layers(root, wide, 0, 0, [LayerState.genesis(wide, layer) for layer in range(5)])
    return root


def test_equal_arguments_give_equal_text(checkpoints: Path) -> None:
    texts = [generate(checkpoints, Bytes(), "def ", 40, 1.0, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert "".join(stream(checkpoints, Bytes(), "def ", 40, 1.0, 1)) == texts[0]
    cold = {generate(checkpoints, Bytes(), "def ", 5, 0.0, seed) for seed in (1, 2)}
    assert len(cold) == 1, "at temperature 0 nothing is left to chance"


def test_text_is_that_of_the_whole_window_before_each_token(checkpoints: Path) -> None:
    """This also holds beyond the context of 12 tokens, where positions move."""
    directory = whole_checkpoint(checkpoints)
    modules = [load_layer(directory, layer).module for layer in range(5)]
    for module in modules:
        for parameter in module.parameters():
            parameter.data.mul_(8.0)
    written = list(b"def ")
    model = _Continuation(modules, 12)
    for _ in range(20):
        with torch.no_grad():
            expected = torch.nn.Sequential(*modules)(torch.tensor([written[-12:]]))[0, -1]
        found = model.logits(written)
        assert (found - expected).abs().max() < 1e-4
        written.append(int(expected.argmax()))
    assert len(set(written[4:])) > 1


def test_text_is_read_within_its_document_as_it_was_learnt(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that keeps attention within documents wrote on from what came before their ends."""
    spec, layers = load_model(checkpoints)
    apart = spec.data.model_copy(update={"packing": "documents", "end_of_document": 0})
    spec = spec.model_copy(update={"data": apart})
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.mul_(8.0)

    def as_learnt(written: list[int]) -> torch.Tensor:
        stream = tokens = torch.tensor([written[-spec.model.context :]])
        told = told_beside(spec, tokens)
        for layer in layers:
            stream = layer(stream, **(told if isinstance(layer, Block) else {}))
        return stream[0, -1]

    logits, compared, ends = _Continuation.logits, 0, (4, 9, 10, 30)

    def compare(model: _Continuation, written: list[int]) -> torch.Tensor:
        nonlocal compared
        with torch.no_grad():
            expected = as_learnt(written)
        assert (logits(model, written) - expected).abs().max() < 1e-3, written
        compared += 1
        if compared in ends:
            return torch.zeros_like(expected).index_fill(0, torch.tensor([0]), 1e6)
        return expected

    monkeypatch.setattr(_Continuation, "logits", compare)
    for prompt in ("ab\0cd", "", "a\0"):
        compared = 0
        list(stream_until(None, (spec, layers), Bytes(), prompt, 40, 1.0, 1))
        assert compared == 40


def test_prompts_may_be_empty_or_longer_than_the_context(checkpoints: Path) -> None:
    assert generate(checkpoints, Bytes(), "", 3) and generate(checkpoints, Bytes(), "x" * 50, 3)
    assert generate(checkpoints, Bytes(), "x", 0) == ""


def test_without_a_prompt_a_document_begins(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text began behind token 0, which in byte pairs is an exclamation mark."""

    class Pairs(Bytes):
        end_of_document = 10

    logits, seen = _Continuation.logits, []

    def noting(model: _Continuation, written: list[int]) -> torch.Tensor:
        seen.append(list(written))
        return logits(model, written)

    monkeypatch.setattr(_Continuation, "logits", noting)
    generate(checkpoints, Pairs(), "", 1)
    Pairs.start_of_document = 11
    generate(checkpoints, Pairs(), "", 1)
    generate(checkpoints, Pairs(), "ab", 1)
    assert seen == [[10], [11], [11, *b"ab"]]


def test_nothing_is_written_behind_the_end_of_a_text(checkpoints: Path) -> None:
    spec, layers = loaded = load_model(checkpoints)
    model = _Continuation(layers, spec.model.context)
    drawn = list(_draw(model, Bytes(), "def ", 40, 1.0, 1))
    end = drawn[20]
    text = "".join(stream_until(end, loaded, Bytes(), "def ", 40, 1.0, 1))
    assert text == "".join(_whole_characters(Bytes(), drawn[: drawn.index(end)], False))
    whole = "".join(stream_until(-1, loaded, Bytes(), "def ", 40, 1.0, 1))
    assert whole == "".join(_whole_characters(Bytes(), drawn, False)) != text


def test_characters_come_whole() -> None:
    text = "a€ü🙂b"
    assert list(_whole_characters(Bytes(), text.encode(), False)) == list(text)
    assert "".join(_whole_characters(Bytes(), b"\xff\xff\xffab\xe2", True)).endswith(
        "b\N{REPLACEMENT CHARACTER}"
    )


def test_characters_come_whole_where_tokens_are_cut_across_them() -> None:
    alphabet = [chr(number) for number in range(0x3041, 0x3094)]
    draw = random.Random(1)
    words = ["".join(draw.choices(alphabet, k=draw.randint(2, 5))) for _ in range(60)]
    texts = ["".join(draw.choices(words, k=40)) for _ in range(400)]
    tokenizer = BytePairTokenizer.train(iter(texts), 600)
    for text in texts:
        tokens = tokenizer.encode(text).tolist()
        assert "".join(_whole_characters(tokenizer, tokens, False)) == text


def test_bytes_that_are_no_text_are_not_held_back() -> None:
    drawn = itertools.repeat(0xE3)
    assert next(_whole_characters(Bytes(), drawn, False)) == "\ufffd" * 4


def test_bad_requests_say_what_to_do(checkpoints: Path, tmp_path: Path, spec: RunSpec) -> None:
    with pytest.raises(UserError, match="negative"):
        stream(checkpoints, Bytes(), "x", 3, -1.0)
    with pytest.raises(UserError, match="no checkpoint with all layers"):
        stream(tmp_path, Bytes(), "x", 3)
    save_layers(tmp_path, spec, 0, 0, [LayerState.genesis(spec, 0)])
    with pytest.raises(UserError, match="no checkpoint with all layers"):
        stream(tmp_path, Bytes(), "x", 3)


def test_a_narrow_model_takes_one_thread_to_write(checkpoints: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        spare_processors(load_model(checkpoints)[0])
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)

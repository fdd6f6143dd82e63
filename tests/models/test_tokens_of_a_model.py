"""An imported model goes on in its own tokens: data of others are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer as Tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast

from p2p_dtfm.cli.commands.data import generate
from p2p_dtfm.cli.commands.models import ExportFormat, _export_once
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.peers.run_source import prepare_run
from p2p_dtfm.train.data import (
    ByteTokenizer,
    Tokenizer,
    open_prepared,
    prepare,
    tokenizer_from_bytes,
)
from p2p_dtfm.train.hugging_face.export import export_hugging_face
from p2p_dtfm.train.hugging_face.gguf_export import export_gguf
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from p2p_dtfm.train.hugging_face.tokenizer_json import read_tokenizer_json, tokenizer_json
from p2p_dtfm.train.model.checkpoint import list_checkpoints
from tests.models.conftest import make_spec, random_states
from tests.models.families import make_model
from tests.models.test_hugging_face import gpt2_like_tokenizer
from tests.train.saved_layers import save_layers


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory in Hugging Face's form, with a byte-pair tokenizer."""
    spec = make_spec(vocabulary=288, layers=1)
    save_layers(tmp_path / "checkpoints", spec, 0, 0, random_states(spec))
    export_hugging_face(checkpoint_of(tmp_path), tmp_path / "model", None)
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(gpt2_like_tokenizer()))
    return tmp_path / "model"


def checkpoint_of(directory: Path) -> Path:
    return list_checkpoints(directory / "checkpoints")[0].directory


def with_end(model: Path, told_by: str) -> Path:
    """The model's texts end with <|endoftext|>, as one of its files says."""
    path = model / told_by
    stated = json.loads(path.read_text()) if path.is_file() else {}
    stated["eos_token" if told_by == "tokenizer_config.json" else "eos_token_id"] = (
        "<|endoftext|>" if told_by == "tokenizer_config.json" else [gpt2_like_tokenizer_end()]
    )
    path.write_text(json.dumps(stated))
    return model


def gpt2_like_tokenizer_end() -> int:
    (added,) = gpt2_like_tokenizer()["added_tokens"]
    return int(added["id"])


def prepared(out: Path, tokenizer: Tokenizer | None) -> str:
    text = out.with_suffix(".txt")
    text.write_text("some words, and more. " * 200)
    prepare([text], out, context=16, tokenizer=tokenizer)
    return str(out)


def training(data: str) -> Training:
    return Training(data, 10, 8, 2, 1e-4)


def test_data_of_another_tokenizer_are_refused_when_a_model_is_imported(
    model: Path, tmp_path: Path
) -> None:
    in_bytes = prepared(tmp_path / "bytes", None)
    with pytest.raises(UserError, match="tokens of another tokenizer") as refused:
        import_hugging_face(model, tmp_path / "new", "", training(in_bytes))
    assert f"--tokenizer {model / 'tokenizer.json'}" in str(refused.value)
    with pytest.raises(UserError, match="no prepared data in"):
        import_hugging_face(model, tmp_path / "new", "", training(str(tmp_path / "nowhere")))
    assert not (tmp_path / "new").exists()
    own = prepared(tmp_path / "own", read_tokenizer_json(model / "tokenizer.json"))
    import_hugging_face(model, tmp_path / "new", "", training(own))
    spec, _ = prepare_run(tmp_path / "new" / "run.toml", tmp_path, lambda *told: None)
    assert spec.data.manifest


def test_a_run_is_not_founded_with_data_of_another_tokenizer(model: Path, tmp_path: Path) -> None:
    told: list[str] = []
    default = training("python-standard-library")
    import_hugging_face(model, tmp_path / "new", "", default, tell=told.append)
    assert any("--tokenizer" in note and "--context 16" in note for note in told)
    run = tmp_path / "new" / "run.toml"
    in_bytes = prepared(tmp_path / "bytes", None)
    run.write_text(run.read_text().replace("python-standard-library", in_bytes))
    with pytest.raises(UserError, match="tokens of another tokenizer"):
        prepare_run(run, tmp_path, lambda *told: None)
    own = prepared(tmp_path / "own", read_tokenizer_json(tmp_path / "new" / "tokenizer.json"))
    run.write_text(run.read_text().replace(in_bytes, own))
    prepare_run(run, tmp_path, lambda *told: None)


@pytest.mark.parametrize("told_by", ["tokenizer_config.json", "config.json"])
def test_documents_end_as_the_models_texts_do_and_so_does_an_export(
    told_by: str, model: Path, tmp_path: Path
) -> None:
    end = gpt2_like_tokenizer_end()
    import_hugging_face(
        with_end(model, told_by), tmp_path / "new", "", training("python-standard-library")
    )
    for given in (model, model / "tokenizer.json", tmp_path / "new" / "tokenizer.json"):
        assert read_tokenizer_json(given).end_of_document == end
    prepared(tmp_path / "own", read_tokenizer_json(model))
    data = open_prepared(tmp_path / "own")
    assert data.tokenizer.end_of_document == data.manifest.tokenizer.end_of_document == end
    tokens = np.concatenate(
        [
            np.fromfile(data.store.held(shard.digest), dtype=data.manifest.token_type)
            for shard in data.manifest.shards
        ]
    )
    assert (tokens == end).sum() >= 1 and not (tokens == data.tokenizer.encode("\0")[0]).any()
    export_hugging_face(checkpoint_of(tmp_path), tmp_path / "out", data.tokenizer)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == end
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == end and theirs.decode([end], skip_special_tokens=True) == ""


def test_an_export_says_what_it_lacks_of_the_model_that_the_run_began_from(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_hugging_face(model, tmp_path / "new", "", training("python-standard-library"))
    begun = make_spec(vocabulary=288, layers=1, initial="ab" * 32)
    saved = save_layers(tmp_path / "begun", begun, 0, 0, random_states(begun))
    _export_once(tmp_path / "bare", saved, ExportFormat.HF, None, False, None)
    assert "--tokenizer-of DIR takes them along" in capsys.readouterr().err
    _export_once(tmp_path / "whole", saved, ExportFormat.HF, tmp_path / "new", False, None)
    assert "--tokenizer-of" not in capsys.readouterr().err


def test_what_import_wrote_can_be_asked_to_write(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_hugging_face(model, tmp_path / "new", "", training("python-standard-library"))
    generate(tmp_path / "new", prompt="some ", tokens=9, temperature=0.0, seed=0)
    drawn = capsys.readouterr().out.removesuffix("\n").removeprefix("some ")
    tokenizer = read_tokenizer_json(model)
    theirs = GPT2LMHeadModel.from_pretrained(model).eval()
    tokens = tokenizer.encode("some ").tolist()
    for _ in range(9):
        with torch.no_grad():
            logits = theirs(torch.tensor([tokens[-16:]])).logits[0, -1]
        tokens.append(int(logits[: tokenizer.vocabulary].argmax()))
    assert drawn == tokenizer.decode(tokens[len(tokenizer.encode("some ")) :])


@pytest.mark.parametrize(
    "change, told",
    [
        ({"learning_rate": -1.0}, "--learning-rate: must be more than 0, not -1.0"),
        ({"total_steps": 10**13}, "--steps: must be less than"),
        ({"microbatch": 3}, r"--microbatch: must divide --global-batch \(8\), not 3"),
        ({"global_batch": 10**9}, "--global-batch: must be"),
        ({"context": 99}, "--context asks for 99"),
    ],
)
def test_an_option_of_import_is_told_by_its_own_name(
    change: dict[str, Any], told: str, model: Path, tmp_path: Path
) -> None:
    asked = replace(training("python-standard-library"), **change)
    with pytest.raises(UserError, match=told) as refused:
        import_hugging_face(model, tmp_path / "new", "", asked)
    assert "config.json" not in str(refused.value)


def test_a_name_and_a_context_that_cannot_be_are_told_by_their_options(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "hf")
    default = training("python-standard-library")
    with pytest.raises(UserError, match=r"^--name: must be a name of .*not Foo_Bar"):
        import_hugging_face(tmp_path / "hf", tmp_path / "new", "Foo_Bar", default)
    long = replace(default, context=100000)
    with pytest.raises(UserError, match=r"^--context: must be at most the .* 100000") as refused:
        import_hugging_face(tmp_path / "hf", tmp_path / "new", "", long)
    assert len(str(refused.value)) < 300


def test_an_odd_tokenizer_beside_the_one_that_is_named_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(gpt2_like_tokenizer()))
    for odd in (
        {"added_tokens": 5},
        {"added_tokens": [{"content": "<|end|>", "id": -1}], "model": {"vocab": {}}},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(odd))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
        tokenizer = read_tokenizer_json(tmp_path / "mine.json")
        assert tokenizer.decode([tokenizer.end_of_document]) == "\0"


def test_documents_do_not_end_with_a_token_of_the_tokenizer_beside(tmp_path: Path) -> None:
    """The number of that token is a word in the named tokenizer, and each document ended with that
    word."""
    own = gpt2_like_tokenizer()
    (tmp_path / "mine.json").write_text(json.dumps(own))
    other = own | {"added_tokens": [{"content": "<|end|>", "id": 42, "special": True}]}
    for folder in (tmp_path, tmp_path / "origin"):
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(other))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    tokenizer = read_tokenizer_json(tmp_path / "mine.json")
    assert tokenizer.decode([tokenizer.end_of_document]) == "\0"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    named = read_tokenizer_json(tmp_path / "mine.json")
    assert named.end_of_document == gpt2_like_tokenizer_end()


def test_tokens_beside_the_bytes_keep_their_numbers(tmp_path: Path) -> None:
    """What was trained in bytes was given an end of its own outside. It came in without: texts
    ended with a zero byte, and its own chat template was said to be another model's."""
    content = json.loads(tokenizer_json(ByteTokenizer()))
    content["added_tokens"] = [{"id": 256, "content": "<|end|>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    ours = read_tokenizer_json(tmp_path)
    assert ours.vocabulary == 257 and ours.end_of_document == 256
    text = "a  b12 \u00e9\n<|end|>"
    assert ours.encode(text).tolist() == list(text.encode())
    theirs = Tokenizers.from_str(tokenizer_json(ours).decode())
    assert theirs.encode(text).ids == list(text.encode())
    content["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": []}))
    with pytest.raises(UserError, match="splits words in a way"):
        read_tokenizer_json(tmp_path)


def test_control_tokens_may_be_of_any_letters_and_digits_may_stand_alone(tmp_path: Path) -> None:
    inner = Tokenizers(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, show_progress=False, initial_alphabet=alphabet)
    inner.train_from_iterator(["words 12 12 12   words" * 50], trainer)
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<\uff5cend\u2581\uff5c>")
    theirs.add_tokens(["two words", "word"])
    theirs.save_pretrained(tmp_path / "hf")
    ours = read_tokenizer_json(tmp_path / "hf")
    assert ours.vocabulary == len(theirs) and ours.end_of_document == theirs.eos_token_id
    again = tokenizer_from_bytes(ours.to_bytes())
    for text in ("12 12345 words  12", "\u00e9 x12y!"):
        assert ours.encode(text).tolist() == again.encode(text).tolist()
        assert ours.encode(text).tolist() == inner.encode(text).ids, text
    assert ours.decode([theirs.eos_token_id]) == theirs.eos_token
    assert theirs.eos_token_id not in ours.encode(theirs.eos_token), "no text turns into it"
    make_model("llama", vocab_size=len(theirs)).save_pretrained(tmp_path / "hf")
    default = training("python-standard-library")
    import_hugging_face(tmp_path / "hf", tmp_path / "new", "", default)
    export_gguf(tmp_path / "new", tmp_path / "model.gguf", None)
    said = GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.pre"].contents()
    assert said == "smollm"

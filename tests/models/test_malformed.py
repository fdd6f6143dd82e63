"""Damaged and hostile directories of models: refused with cause and fix, and nothing stays."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.byte_pairs import BytePairTokenizer
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from tests.models.families import make_model

TRAINING = Training("python-standard-library", 10, 8, 2, 1e-4)
CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX, TOKENIZER = "model.safetensors.index.json", "tokenizer.json"
MATRIX = "model.layers.1.mlp.up_proj.weight"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in one file, with a tokenizer that fits it."""
    directory = tmp_path_factory.mktemp("sound") / "llama"
    make_model("llama", vocab_size=300).save_pretrained(directory)
    tokenizer = BytePairTokenizer.train(iter(["some words, some more words " * 20]), 280)
    (directory / TOKENIZER).write_bytes(tokenizer.to_bytes())
    return directory


def config(**changes: object) -> Damage:
    def damage(directory: Path) -> None:
        path = directory / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def without(key: str) -> Damage:
    def damage(directory: Path) -> None:
        content = json.loads((directory / CONFIG).read_text())
        del content[key]
        (directory / CONFIG).write_text(json.dumps(content))

    return damage


def rope(**stated: object) -> Damage:
    return config(rope_parameters={"rope_theta": 10000.0, **stated})


def writes(name: str, content: bytes) -> Damage:
    return lambda directory: (directory / name).write_bytes(content)


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return damage


def value(number: float) -> Damage:
    return weights(lambda tensors: tensors[MATRIX].view(-1)[-1:].fill_(number))


def index(shard: str) -> Damage:
    """An index by which one tensor lies in `shard`."""

    def damage(directory: Path) -> None:
        names = dict.fromkeys(load_file(directory / WEIGHTS), WEIGHTS)
        content = {"metadata": {}, "weight_map": names | {MATRIX: shard}}
        (directory / INDEX).write_text(json.dumps(content))

    return damage


def twice_in_shards(directory: Path) -> None:
    save_file(
        {MATRIX: load_file(directory / WEIGHTS)[MATRIX] + 1}, directory / "second.safetensors"
    )
    index("second.safetensors")(directory)


def cut_short(directory: Path) -> None:
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def pickle_only(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")


def duplicate_key(directory: Path) -> None:
    path = directory / CONFIG
    path.write_text(path.read_text().rstrip().removesuffix("}") + ', "num_hidden_layers": 1}')


def tokenizer(**changes: object) -> Damage:
    def damage(directory: Path) -> None:
        path = directory / TOKENIZER
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def tokenizer_model(**changes: object) -> Damage:
    def damage(directory: Path) -> None:
        path = directory / TOKENIZER
        content = json.loads(path.read_text())
        content["model"] |= changes
        path.write_text(json.dumps(content))

    return damage


def far_token(directory: Path) -> None:
    tokenizer(added_tokens=[{"id": 9000, "content": "<|far|>"}])(directory)


def other_tokenizer(directory: Path) -> None:
    text = " ".join(f"word{number * 7919 % 10007}" for number in range(5000))
    (directory / TOKENIZER).write_bytes(BytePairTokenizer.train(iter([text]), 400).to_bytes())


def a_pipe(name: str) -> Damage:
    def damage(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return damage


def a_shard_that_is_a_pipe(directory: Path) -> None:
    a_pipe("pipe.safetensors")(directory)
    index("pipe.safetensors")(directory)
    (directory / WEIGHTS).rename(directory / "first.safetensors")
    path = directory / INDEX
    path.write_text(path.read_text().replace(WEIGHTS, "first.safetensors"))


def nameless_token(directory: Path) -> None:
    content = json.loads((directory / TOKENIZER).read_text())
    tokenizer(added_tokens=[{"id": len(content["model"]["vocab"])}])(directory)


def huge_header(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


MALFORMED: dict[str, tuple[Damage, str]] = {
    "no configuration": (lambda directory: (directory / CONFIG).unlink(), "cannot read"),
    "no JSON": (writes(CONFIG, b"layers: 2"), "does not describe"),
    "a pipe": (a_pipe(CONFIG), "it is no file"),
    "a tokenizer that is a pipe": (a_pipe(TOKENIZER), "it is no file"),
    "a list": (writes(CONFIG, b"[]"), "does not describe"),
    "no text": (writes(CONFIG, b"\xff\xfe{}"), "does not describe"),
    "deep": (writes(CONFIG, b"[" * 100_000), "does not describe"),
    "duplicate keys": (duplicate_key, "num_hidden_layers.*twice"),
    "a key is missing": (without("hidden_size"), "hidden_size"),
    "a number as text": (config(hidden_size="24"), "hidden_size"),
    "no layers": (config(num_hidden_layers=0), "layers"),
    "fewer than no layers": (config(num_hidden_layers=-1), "layers"),
    "absurdly many layers": (config(num_hidden_layers=10**12), "layers"),
    "layers beyond any integer": (config(num_hidden_layers=10**40), "layers"),
    "no width": (config(hidden_size=0), "width"),
    "absurd width": (config(hidden_size=1 << 60, head_dim=None), "width"),
    "no heads": (config(num_attention_heads=0), "heads"),
    "negative groups": (config(num_key_value_heads=-2), "kv_heads"),
    "no vocabulary": (config(vocab_size=0), "vocabulary"),
    "an end that is no token": (config(eos_token_id="x"), "eos_token_id"),
    "an end below all tokens": (config(eos_token_id=[2, -3]), "eos_token_id is -3"),
    "a beginning beyond all tokens": (config(bos_token_id=1 << 40), "bos_token_id is"),
    "two beginnings": (config(bos_token_id=[1, 2]), "bos_token_id"),
    "heads of nothing": (config(head_dim=0), "head_dim is 0"),
    "no groups": (config(num_key_value_heads=0), "num_key_value_heads is 0"),
    "a feed-forward network of nothing": (config(intermediate_size=0), "intermediate_size is 0"),
    "absurd vocabulary": (config(vocab_size=10**15), "vocabulary"),
    "no positions": (config(max_position_embeddings=0), "context"),
    "epsilon of nothing": (config(rms_norm_eps=0.0), "norm_epsilon"),
    "epsilon below nothing": (config(rms_norm_eps=-1e-6), "norm_epsilon"),
    "an odd head": (config(head_dim=5), "one too many"),
    "a sliding window": (config(layer_types=["sliding_attention"] * 2), "slides"),
    "another activation": (config(hidden_act="gelu"), "hidden_act"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "quantised"),
    "an unknown rope": (rope(rope_type="spiral"), "'spiral' is unknown"),
    "longrope": (
        rope(rope_type="longrope", short_factor=[1.0], long_factor=[1.0]),
        "rope type 'longrope' is unknown",
    ),
    "a rope of no type": (rope(rope_type=["linear"], factor=2.0), "rope type"),
    "a rope without factor": (rope(rope_type="linear"), "factor"),
    "a rope that shrinks": (rope(rope_type="linear", factor=-2.0), "factor"),
    "yarn without attention": (
        rope(rope_type="yarn", factor=4.0, attention_factor=0.0),
        "attention_factor is 0",
    ),
    "a rope beyond numbers": (rope(rope_type="linear", factor=10**400), "factor|number"),
    "a half rope": (rope(rope_type="default", partial_rotary_factor=0.5), "part of each head"),
    "theta of nothing": (config(rope_parameters={"rope_theta": 0.0}), "theta"),
    "yarn without end": (
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=0),
        "original_max_position_embeddings",
    ),
    "a tensor is missing": (weights(lambda t: t.pop(MATRIX)), f"lacks {MATRIX}"),
    "a tensor too many": (
        weights(lambda t: t.update({"model.layers.7.extra": torch.ones(2)})),
        "model.layers.7.extra",
    ),
    "a wrong shape": (weights(lambda t: t.update({MATRIX: torch.ones(3, 5)})), "has the shape"),
    "rows for columns": (
        weights(lambda t: t.update({MATRIX: t[MATRIX].t().contiguous()})),
        "has the shape",
    ),
    "whole numbers": (weights(lambda t: t.update({MATRIX: t[MATRIX].int()})), "stored as I32"),
    "one tensor under two names": (
        weights(lambda t: t.update({MATRIX.removeprefix("model."): t[MATRIX] + 1})),
        f"{MATRIX} twice",
    ),
    "NaN": (value(float("nan")), "no numbers"),
    "infinity": (value(float("inf")), "no numbers"),
    "beyond fp32": (
        weights(lambda t: t.update({MATRIX: t[MATRIX].double() * 1e300})),
        "no numbers",
    ),
    "pickle": (pickle_only, "is a pickle"),
    "no weights": (lambda directory: (directory / WEIGHTS).unlink(), "no model"),
    "weights cut short": (cut_short, "cannot read"),
    "empty weights": (writes(WEIGHTS, b""), "cannot read"),
    "huge header": (huge_header, "cannot read"),
    "weights are a directory": (
        lambda directory: ((directory / WEIGHTS).unlink(), (directory / WEIGHTS).mkdir()),
        "no model",
    ),
    "an index that is no JSON": (writes(INDEX, b"{"), "cannot read"),
    "an index of nothing": (writes(INDEX, b'{"weight_map": {}}'), "lacks"),
    "a shard is missing": (index("absent.safetensors"), "cannot read"),
    "a shard elsewhere": (index("../other.safetensors"), "outside its directory"),
    "a shard at the root": (index("/etc/hostname"), "outside its directory"),
    "the directory above": (index(".."), "outside its directory"),
    "a shard of no name": (index(""), "outside its directory"),
    "a shard with a zero byte": (index("a\0b"), "outside its directory"),
    "a shard with half a letter": (index("\ud800"), "outside its directory"),
    "a shard that is a number": (writes(INDEX, b'{"weight_map": {"x": 7}}'), "cannot read"),
    "a shard that is a pipe": (a_shard_that_is_a_pipe, "pipe.safetensors: it is no file"),
    "one tensor in two shards": (twice_in_shards, f"{MATRIX} twice"),
    "another tokenizer": (other_tokenizer, "tokenizer of another model"),
    "a token beyond the model": (far_token, "token"),
    "a tokenizer that is no JSON": (writes(TOKENIZER, b"{"), "cannot read"),
    "a tokenizer that is no text": (writes(TOKENIZER, b"\xff\xff"), "cannot read"),
    "added tokens that are none": (tokenizer(added_tokens=[7]), "tokenizer.json"),
    "an added token without a text": (nameless_token, "tokenizer.json"),
    "added tokens as a number": (tokenizer(added_tokens=7), "tokenizer.json"),
    "a vocabulary that is none": (tokenizer_model(vocab=[1, 2]), "tokenizer.json"),
    "merges that are none": (tokenizer_model(merges=7), "tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_directory_is_refused(case: str, sound: Path, tmp_path: Path) -> None:
    damage, cause = MALFORMED[case]
    shutil.copytree(sound, tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(UserError, match=cause) as refused:
        import_hugging_face(tmp_path / "model", tmp_path / "new", "", TRAINING)
    assert refused.value.fixes
    assert not list(tmp_path.glob("new*")), "nothing half imported stays"


def test_the_sound_one_comes_in(sound: Path, tmp_path: Path) -> None:
    """It comes in though something beside it would keep a reader waiting."""
    shutil.copytree(sound, tmp_path / "model")
    for name in ("tokenizer_config.json", "generation_config.json"):
        a_pipe(name)(tmp_path / "model")
    import_hugging_face(tmp_path / "model", tmp_path / "new", "", TRAINING)
    assert (tmp_path / "new" / "run.toml").is_file()


def test_a_missing_tokenizer_is_said(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "model")
    (tmp_path / "model" / TOKENIZER).unlink()
    notes: list[str] = []
    import_hugging_face(tmp_path / "model", tmp_path / "new", "", TRAINING, tell=notes.append)
    assert len(notes) == 1 and f"there is no {TOKENIZER}" in notes[0]


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\rb", "a\x7fb"])
def test_what_a_directory_is_called_does_not_spoil_the_run_spec(
    name: str, sound: Path, tmp_path: Path
) -> None:
    """The maker of the archive chose that name, and the run spec says where the model is from."""
    shutil.copytree(sound, tmp_path / name)
    import_hugging_face(tmp_path / name, tmp_path / "new", "", TRAINING)
    text = (tmp_path / "new" / "run.toml").read_text("utf-8")
    assert text.splitlines()[0] in ("# Goes on from a [2Jb.", "# Goes on from a b.")

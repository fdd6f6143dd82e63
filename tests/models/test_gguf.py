"""One file for llama.cpp: the `gguf` package reads it, and it holds what transformers makes of the
model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.byte_pairs import KNOWN_PATTERNS
from p2p_dtfm.train.data.tokenizer import ByteTokenizer
from p2p_dtfm.train.hugging_face.families import HEAD_NAME, TOKEN_NAMES
from p2p_dtfm.train.hugging_face.gguf_export import export_gguf, side_by_side
from p2p_dtfm.train.hugging_face.model_import import import_hugging_face
from tests.models.conftest import make_spec, random_states
from tests.models.families import CASES, made, make_model
from tests.models.test_families import TRAINING, their_tokenizer
from tests.models.test_origin_files import a_model
from tests.train.saved_layers import save_layers

UNKNOWN_THERE = {"qwen3, biases": "attention_bias", "yarn, all stated": "whole_rotations"}


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """The tensors, and what the file says of them."""
    reader = GGUFReader(path)
    said = {name: field.contents() for name, field in reader.fields.items()}
    return {tensor.name: np.array(tensor.data) for tensor in reader.tensors}, said


@pytest.mark.parametrize("case", [case for case in CASES if case not in UNKNOWN_THERE])
def test_all_tensors_are_there_and_equal(case: str, tmp_path: Path) -> None:
    model = made(case)
    model.save_pretrained(tmp_path / "hf")
    import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    export_gguf(tmp_path / "in", tmp_path / "model.gguf", None)
    tensors, said = read(tmp_path / "model.gguf")
    family = str(said["general.architecture"])
    assert family == CASES[case][0] and not list(tmp_path.glob(".*partial*"))
    theirs = model.state_dict()
    config = model.config
    expected = [theirs[TOKEN_NAMES[family]], theirs[HEAD_NAME]]
    assert [tensors[name].shape for name in ("token_embd.weight", "output.weight")] == [
        tuple(tensor.shape) for tensor in expected
    ]
    assert all(
        np.array_equal(tensors[name], tensor.numpy())
        for name, tensor in zip(("token_embd.weight", "output.weight"), expected, strict=True)
    )
    for layer in range(config.num_hidden_layers):
        if family == "gpt2":
            assert np.array_equal(
                tensors[f"blk.{layer}.attn_qkv.weight"],
                theirs[f"transformer.h.{layer}.attn.c_attn.weight"].t().numpy(),
            )
            continue
        for name, letter in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")):
            rows = theirs[f"model.layers.{layer}.self_attn.{name}.weight"]
            if family == "llama" and letter != "v":
                rows = side_by_side(rows, config.head_dim)
            assert np.array_equal(tensors[f"blk.{layer}.attn_{letter}.weight"], rows.numpy())
    # rope_freqs is made of the configuration, all else is a parameter
    count = sum(value.size for name, value in tensors.items() if name != "rope_freqs.weight")
    assert count == sum(parameter.numel() for parameter in model.parameters())


def test_pairs_that_turn_together_lie_side_by_side() -> None:
    """Where the file turns neighbours, this model turns halves: queries and keys have the same
    products."""
    heads, width, angle = 2, 6, torch.tensor([0.3, 0.7, 1.1])
    rows = torch.randn(heads * width, 1)
    first, second = rows.view(heads, 2, width // 2).unbind(1)
    halves = torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), 1
    ).reshape(-1, 1)
    even, odd = side_by_side(rows, width).view(heads, width // 2, 2).unbind(2)
    neighbours = torch.stack(
        (even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()), 2
    ).reshape(-1, 1)
    assert torch.equal(side_by_side(halves, width), neighbours)


@pytest.mark.parametrize("case", UNKNOWN_THERE)
def test_what_llama_cpp_would_compute_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    made(case).save_pretrained(tmp_path / "hf")
    import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    with pytest.raises(UserError, match=UNKNOWN_THERE[case]):
        export_gguf(tmp_path / "in", tmp_path / "model.gguf", None)
    assert not list(tmp_path.glob("model*"))


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    tokenizer = their_tokenizer(280)
    make_model("llama", vocab_size=288).save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    export_gguf(tmp_path / "in", tmp_path / "model.gguf", None)
    _, said = read(tmp_path / "model.gguf")
    pieces, types = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    assert isinstance(pieces, list) and isinstance(types, list) and len(pieces) == 288
    content = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    assert all(pieces[token] == piece for piece, token in content["model"]["vocab"].items())
    assert pieces[tokenizer.eos_token_id] == "<|end|>" and types[tokenizer.eos_token_id] == 3
    assert types[287] == 5, "tokens without a meaning are marked as unused"
    assert said["tokenizer.ggml.merges"] == [" ".join(it) for it in content["model"]["merges"]]
    assert said["tokenizer.chat_template"] == tokenizer.chat_template


def test_all_tokens_that_end_a_text_and_a_template_in_the_configuration_go_along(
    tmp_path: Path,
) -> None:
    tokenizer = their_tokenizer(280)
    model = make_model("llama", vocab_size=288)
    eot = tokenizer.bos_token_id
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eom|>"]})
    eom = tokenizer.convert_tokens_to_ids("<|eom|>")
    end = tokenizer.eos_token_id
    model.config.eos_token_id, model.generation_config.eos_token_id = end, [end, eom, eot]
    model.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf", save_jinja_files=False)
    assert not (tmp_path / "hf" / "chat_template.jinja").exists()
    import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    export_gguf(tmp_path / "in", tmp_path / "model.gguf", None)
    _, said = read(tmp_path / "model.gguf")
    assert said["tokenizer.chat_template"] == tokenizer.chat_template
    kinds = {kind: said[f"tokenizer.ggml.{kind}_token_id"] for kind in ("eos", "eot", "eom")}
    assert kinds == {"eos": end, "eot": eot, "eom": eom}


def test_a_token_that_is_none_is_left_out(tmp_path: Path) -> None:
    """Llama's first files say -1 where no token fills up, and no such model could be exported."""
    model = a_model(tmp_path / "hf", "llama")
    stated = {"pad_token_id": -1, "bos_token_id": 5_000_000, "eos_token_id": [-1, 2]}
    for name in ("config.json", "generation_config.json"):
        content = json.loads((model / name).read_text()) | stated
        (model / name).write_text(json.dumps(content))
    import_hugging_face(model, tmp_path / "in", "", TRAINING)
    export_gguf(tmp_path / "in", tmp_path / "model.gguf", None)
    _, said = read(tmp_path / "model.gguf")
    kinds = {name.split(".")[-1] for name in said if name.endswith("_token_id")}
    assert kinds == {"bos_token_id", "eos_token_id", "unknown_token_id"}
    assert said["tokenizer.ggml.bos_token_id"] == 1, "what its tokenizer puts before texts"
    assert said["tokenizer.ggml.eos_token_id"] == 2


def test_a_strangers_tokenizer_that_is_none_is_no_bug(tmp_path: Path) -> None:
    model = a_model(tmp_path / "hf", "llama")
    import_hugging_face(model, tmp_path / "in", "", TRAINING)
    path = tmp_path / "in" / "origin" / "tokenizer.json"
    content = json.loads(path.read_text())
    half = [{"id": 1, "content": "\ud800", "special": True}]
    for odd in (
        {"added_tokens": [{"id": 1}]},
        {"added_tokens": 5},
        {"normalizer": [1]},
        {"added_tokens": half},
        {"model": content["model"] | {"merges": ["ab"]}},
    ):
        path.write_text(json.dumps(content | odd))
        with pytest.raises(UserError, match="of the model that the run began from"):
            export_gguf(tmp_path / "in", tmp_path / "model.gguf", None)
        assert not (tmp_path / "model.gguf").exists()
    path.write_text(json.dumps(content))
    template = tmp_path / "in" / "origin" / "tokenizer_config.json"
    (tmp_path / "in" / "origin" / "chat_template.jinja").unlink(missing_ok=True)
    template.write_text(json.dumps({"chat_template": "half \ud800"}))
    with pytest.raises(UserError, match="of the model that the run began from"):
        export_gguf(tmp_path / "in", tmp_path / "model.gguf", None)


def test_a_word_that_no_merges_lead_to_is_another_token_there(tmp_path: Path) -> None:
    """With Qwen's splitting llama.cpp always merges; this tokenizer takes such words whole."""
    make_model("llama", vocab_size=288).save_pretrained(tmp_path / "hf")
    (qwen,) = (pattern for pattern, name in KNOWN_PATTERNS.items() if name == "qwen2")
    their_tokenizer(280, qwen).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer.json"
    content = json.loads(path.read_text())
    export_to = tmp_path / "model.gguf"
    import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    export_gguf(tmp_path / "in", export_to, None)
    assert read(export_to)[1]["tokenizer.ggml.pre"] == "qwen2"
    content["model"]["vocab"]["zebra"] = 1 + max(each["id"] for each in content["added_tokens"])
    path.write_text(json.dumps(content))
    import_hugging_face(tmp_path / "hf", tmp_path / "other", "", TRAINING)
    with pytest.raises(UserError, match="no merges lead to 'zebra'"):
        export_gguf(tmp_path / "other", tmp_path / "other.gguf", None)


def test_bytes_are_tokens_there_too(tmp_path: Path) -> None:
    spec = make_spec()
    saved = save_layers(tmp_path / "c", spec, 0, 0, random_states(spec))
    export_gguf(saved, tmp_path / "model.gguf", ByteTokenizer())
    tensors, said = read(tmp_path / "model.gguf")
    assert said["tokenizer.ggml.model"] == "gpt2" and said["tokenizer.ggml.eos_token_id"] == 0
    assert "after step 0" in str(said["general.description"])
    assert said["gpt2.context_length"] == spec.model.context
    with pytest.raises(UserError, match="exists"):
        export_gguf(saved, tmp_path / "model.gguf", None)
    assert len(said["tokenizer.ggml.merges"]) == 1  # type: ignore[arg-type]
    assert tensors["position_embd.weight"].shape[0] == spec.model.context

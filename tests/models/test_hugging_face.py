"""Models go out to the real `transformers` and come in from it, and compute the same."""

import json
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.data import prepare
from p2p_dtfm.train.data.byte_pairs import BytePairTokenizer
from p2p_dtfm.train.data.tokenizer import ByteTokenizer
from p2p_dtfm.train.hugging_face.export import export_hugging_face, export_safetensors
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from p2p_dtfm.train.hugging_face.tokenizer_json import read_tokenizer_json
from p2p_dtfm.train.model.gpt import layer_count, told_beside
from p2p_dtfm.train.model.initial_state import (
    initial_layer_path,
    initial_layer_state,
    initial_paths,
    parse_initial,
)
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.narrow.fixed_code import with_code
from tests.models.conftest import make_spec, own_logits, random_states
from tests.train.saved_layers import save_layers

TRAINING = Training("python-standard-library", 10, 8, 2, 1e-4)
TEXT = 'def f(x):\n\treturn "é ∑ 🙂"  # 42\r\n\0next'


def tokens_of(spec: RunSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(spec.model.vocabulary, (2, spec.model.context), generator=generator)


def their_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    model, report = GPT2LMHeadModel.from_pretrained(directory, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(tokens).logits


def imported_states(directory: Path, spec: RunSpec) -> list[LayerState]:
    folder = directory / "initial"
    return [
        initial_layer_state(spec, layer, initial_layer_path(folder, layer))
        for layer in range(layer_count(spec))
    ]


def test_logits_of_the_export_equal_ours(
    spec: RunSpec, states: list[LayerState], checkpoint: Path, tmp_path: Path
) -> None:
    export_hugging_face(checkpoint, tmp_path / "out", ByteTokenizer())
    tokens = tokens_of(spec)
    ours, theirs = own_logits(states, tokens), their_logits(tmp_path / "out", tokens)
    assert ours.abs().max() > 1
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5), (ours - theirs).abs().max()


def test_transformers_generates_from_the_export(checkpoint: Path, tmp_path: Path) -> None:
    export_hugging_face(checkpoint, tmp_path / "out", ByteTokenizer())
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = tokenizer("def", return_tensors="pt")
    written = model.generate(
        prompt.input_ids,
        attention_mask=prompt.attention_mask,
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
    )
    assert written.shape[1] > 3
    assert tokenizer.decode(written[0]).startswith("def")


def test_the_byte_tokenizer_is_the_same_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    export_hugging_face(checkpoint, tmp_path / "out", ByteTokenizer())
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == list(TEXT.encode())
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    configuration = json.loads((tmp_path / "out" / "config.json").read_text())
    assert configuration["eos_token_id"] == 0


def test_a_byte_pair_tokenizer_is_the_same_elsewhere(tmp_path: Path) -> None:
    ours = BytePairTokenizer.train(iter(["def return self, if x is None: " * 50]), 300)
    spec = make_spec(vocabulary=ours.vocabulary)
    saved = save_layers(tmp_path / "c", spec, 0, 0, random_states(spec))
    export_hugging_face(saved, tmp_path / "out", ours)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == ours.encode(TEXT).tolist()
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT


def test_one_file_holds_every_parameter_under_our_names(
    states: list[LayerState], checkpoint: Path, tmp_path: Path
) -> None:
    export_safetensors(checkpoint, tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    for state in states:
        for name, parameter in state.module.named_parameters():
            assert torch.equal(tensors.pop(f"layer.{state.layer}.{name}"), parameter.detach())
    assert not tensors


def test_a_full_disk_is_called_by_the_name_that_was_given(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not name the hidden directory in which the export would have been made."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=100))
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "new", tmp_path / "there"):
        with pytest.raises(UserError, match="free") as refused:
            export_hugging_face(checkpoint, out, None)
        assert "partial" not in refused.value.cause and str(tmp_path) in refused.value.cause
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "there"]
    assert not list((tmp_path / "there").iterdir())


def test_nothing_is_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="not empty"):
        export_hugging_face(checkpoint, tmp_path / "out", None)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        export_safetensors(checkpoint, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_out_may_be_where_one_is_and_what_lies_beside_it_stays(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hf.partial").mkdir()
    (tmp_path / "hf.partial" / "mine.txt").write_text("precious")
    (tmp_path / "one.safetensors.partial").write_text("precious")
    for name in ("exported", "imported"):
        (tmp_path / name).mkdir()
    killed = tmp_path / "exported" / ".p2p-dtfm-partial-999999999-x"
    killed.mkdir()
    export_hugging_face(checkpoint, tmp_path / "hf", None)
    export_safetensors(checkpoint, tmp_path / "one.safetensors")
    monkeypatch.chdir(tmp_path / "exported")
    export_hugging_face(checkpoint, Path("."), ByteTokenizer())
    assert Path("config.json").is_file() and not killed.exists()
    monkeypatch.chdir(tmp_path / "imported")
    import_hugging_face(tmp_path / "exported", Path("."), "", TRAINING)
    assert sorted(path.name for path in Path(".").iterdir()) == [
        *("initial", "origin", "run.toml", "tokenizer.json"),
    ]
    assert (tmp_path / "hf.partial" / "mine.txt").read_text() == "precious"
    assert (tmp_path / "one.safetensors.partial").read_text() == "precious"


def test_an_export_comes_back_bit_for_bit(
    spec: RunSpec, states: list[LayerState], checkpoint: Path, tmp_path: Path
) -> None:
    export_hugging_face(checkpoint, tmp_path / "hf", ByteTokenizer())
    imported = import_hugging_face(tmp_path / "hf", tmp_path / "new", "", TRAINING)
    assert imported.model == spec.model.model_copy(update={"initial": imported.model.initial})
    for ours, theirs in zip(states, imported_states(tmp_path / "new", imported), strict=True):
        assert torch.equal(ours.parameters, theirs.parameters)
        assert theirs.version == 0 and not theirs.first_moments.any()
    assert tomllib.loads((tmp_path / "new" / "run.toml").read_text())["name"] == "hf"
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == ByteTokenizer().to_bytes()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_transformers_comes_in(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(2)
    configuration = GPT2Config(
        vocab_size=40, n_positions=12, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=tied
    )
    model = GPT2LMHeadModel(configuration).to(dtype)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path / "hf")
    imported = import_hugging_face(tmp_path / "hf", tmp_path / "new", "", TRAINING)
    tokens = tokens_of(imported)
    ours = own_logits(imported_states(tmp_path / "new", imported), tokens)
    with torch.no_grad():
        theirs = model.float().eval()(tokens).logits
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4), (ours - theirs).abs().max()


def test_a_head_unlike_the_embedding_that_it_is_said_to_be_is_refused(tmp_path: Path) -> None:
    configuration = GPT2Config(vocab_size=40, n_positions=12, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(configuration).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["transformer.wte.weight"]
    save_file(tensors | {"lm_head.weight": embedding + 0.1}, path)
    with pytest.raises(UserError, match="is another matrix") as refused:
        import_hugging_face(tmp_path / "hf", tmp_path / "new", "", TRAINING)
    assert "set tie_word_embeddings to false" in str(refused.value)
    save_file(tensors | {"lm_head.weight": embedding.clone()}, path)
    assert import_hugging_face(tmp_path / "hf", tmp_path / "new", "", TRAINING).model.tied_head
    save_file(tensors | {"lm_head.weight": embedding + 0.1}, path)
    stated = tmp_path / "hf" / "config.json"
    stated.write_text(json.dumps(json.loads(stated.read_text()) | {"tie_word_embeddings": False}))
    untied = import_hugging_face(tmp_path / "hf", tmp_path / "untied", "", TRAINING)
    assert not untied.model.tied_head


def test_a_model_in_several_files_comes_in(checkpoint: Path, tmp_path: Path) -> None:
    export_hugging_face(checkpoint, tmp_path / "hf", None)
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").is_file()
    whole = import_hugging_face(tmp_path / "hf", tmp_path / "a", "x", TRAINING)
    parts = import_hugging_face(tmp_path / "parts", tmp_path / "b", "x", TRAINING)
    assert whole.digest() == parts.digest()


def test_names_without_prefix_come_in(checkpoint: Path, tmp_path: Path) -> None:
    export_hugging_face(checkpoint, tmp_path / "hf", None)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)  # the mask that old files hold
    whole = import_hugging_face(tmp_path / "hf", tmp_path / "a", "x", TRAINING)
    save_file(tensors, path)
    bare = import_hugging_face(tmp_path / "hf", tmp_path / "b", "x", TRAINING)
    assert whole.digest() == bare.digest()


def gpt2_like_tokenizer() -> dict:
    """A byte-pair tokenizer in the form in which GPT-2's own is published."""
    ours = BytePairTokenizer.train(iter(["some words, some more words " * 20]), 280)
    content = json.loads(ours.to_bytes())
    end = len(content["model"]["vocab"])
    content["model"]["vocab"]["<|endoftext|>"] = end
    content["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    content["added_tokens"] = [
        {
            "id": end,
            "content": "<|endoftext|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": True,
            "special": True,
        }
    ]
    content["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": False,
        "use_regex": True,
    }
    return content


def test_the_tokenizer_comes_in_too(tmp_path: Path) -> None:
    spec = make_spec(vocabulary=288)
    checkpoint = save_layers(tmp_path / "checkpoints", spec, 0, 0, random_states(spec))
    export_hugging_face(checkpoint, tmp_path / "hf", None)
    content = gpt2_like_tokenizer()
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(content))
    import_hugging_face(tmp_path / "hf", tmp_path / "new", "", TRAINING)
    ours = BytePairTokenizer.from_bytes((tmp_path / "new" / "tokenizer.json").read_bytes())
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    plain = "some words, and more: é"
    assert ours.encode(plain).tolist() == theirs(plain)["input_ids"]
    assert ours.vocabulary == len(content["model"]["vocab"])
    (tmp_path / "text.txt").write_text("some words, and more. " * 200)
    given = read_tokenizer_json(tmp_path / "new" / "tokenizer.json")
    manifest = prepare([tmp_path / "text.txt"], tmp_path / "data", context=16, tokenizer=given)
    assert manifest.vocabulary == ours.vocabulary, "data for it can be prepared"


def test_the_initial_state_is_checked(spec: RunSpec, checkpoint: Path, tmp_path: Path) -> None:
    export_hugging_face(checkpoint, tmp_path / "hf", None)
    imported = import_hugging_face(tmp_path / "hf", tmp_path / "new", "", TRAINING)
    folder = tmp_path / "new" / "initial"
    assert len(initial_paths(folder, imported)) == layer_count(imported) + 1
    payload = (folder / "initial.json").read_bytes()
    parse_initial(payload, imported)
    with pytest.raises(PeerFault, match="does not hash"):
        parse_initial(payload + b" ", imported)
    wider = imported.model_copy(update={"model": imported.model.model_copy(update={"width": 48})})
    with pytest.raises(PeerFault, match="layer 0 has"):
        parse_initial(payload, wider)
    layer = initial_layer_path(folder, 1)
    content = bytearray(layer.read_bytes())
    content[-4:] = numpy.float32("nan").tobytes()
    layer.write_bytes(content)
    with pytest.raises(PeerFault, match="no numbers"):
        initial_layer_state(imported, 1, layer)
    with pytest.raises(UserError, match="is not the file that was imported"):
        initial_paths(folder, imported)
    layer.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        initial_paths(folder, imported)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"activation_function": "relu"}, "activation_function"),
        ({"layer_norm_epsilon": 0}, "norm_epsilon"),
        ({"n_inner": 17}, "has the shape"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"n_embd": "wide"}, "does not describe"),
        ({"n_embd": 48, "n_inner": None}, "has the shape"),
        ({"n_layer": 9}, "lacks transformer.h.3"),
        ({"n_head": 7}, "must divide"),
    ],
)
def test_models_of_another_kind_are_refused(
    change: dict, cause: str, checkpoint: Path, tmp_path: Path
) -> None:
    export_hugging_face(checkpoint, tmp_path / "hf", None)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=cause):
        import_hugging_face(tmp_path / "hf", tmp_path / "new", "", TRAINING)
    assert not list(tmp_path.glob("new*")), "nothing half done stays"


def test_pickles_and_damaged_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    export_hugging_face(checkpoint, tmp_path / "hf", None)
    path = tmp_path / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot read"):
        import_hugging_face(tmp_path / "hf", tmp_path / "new", "", TRAINING)
    path.rename(tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        import_hugging_face(tmp_path / "hf", tmp_path / "new", "", TRAINING)


def test_what_writes_few_channels_goes_out_as_a_plain_model(tmp_path: Path) -> None:
    spec = make_spec(written_width=8)
    states = random_states(spec)
    saved = save_layers(tmp_path / "c", spec, 0, 0, states)
    export_hugging_face(saved, tmp_path / "out", ByteTokenizer())
    stream = tokens = tokens_of(spec)
    told = told_beside(spec, tokens)
    with torch.no_grad():
        for state in states[:-1]:
            stream = state.module(stream, **(told if state.layer else {}))
        ours = states[-1].module(with_code(stream, told["code"]))
    theirs = their_logits(tmp_path / "out", tokens)
    assert ours.abs().max() > 1
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5), (ours - theirs).abs().max()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["run"] == spec.digest(), "the run that trained it"
    assert spec.digest() in (tmp_path / "out" / "README.md").read_text()

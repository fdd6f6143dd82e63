"""What a model's directory says besides its weights reaches all members of the run."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from gguf import GGUFReader
from tokenizers import Tokenizer as Tokenizers
from transformers import AutoTokenizer

from p2p_dtfm.cli.commands.data import tokenizer_of
from p2p_dtfm.cli.commands.models import ExportFormat, _export_once
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.peers.run_source import prepare_run
from p2p_dtfm.daemon.state_transfer.initial_states import InitialStates, store_initial
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.train.data import BlobStore, ByteTokenizer, Tokenizer, prepare
from p2p_dtfm.train.data.tokenizer import ending_with
from p2p_dtfm.train.hugging_face.export import (
    ends_of,
    export_hugging_face,
    model_in,
    special_tokens,
)
from p2p_dtfm.train.hugging_face.gguf_export import export_gguf
from p2p_dtfm.train.hugging_face.model_import import import_hugging_face
from p2p_dtfm.train.hugging_face.origin_files import (
    OriginFiles,
    _written,
    pack,
    travelled,
    unpack,
)
from p2p_dtfm.train.hugging_face.tokenizer_json import read_tokenizer_json
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.initial_state import (
    InitialFile,
    InitialState,
    initial_layer_path,
    initial_layer_state,
    initial_paths,
    parse_initial,
)
from tests.models.families import make_model
from tests.models.llamas_tokenizer import save_tokenizer
from tests.models.test_families import TRAINING, their_tokenizer
from tests.train.saved_layers import save_layers

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"

SLOW = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""}
"""A step of a tokenizer that takes for ever for some texts."""


def a_model(directory: Path, family: str) -> Path:
    """A model with Llama's SentencePiece, or with byte-level pairs and special tokens behind
    them."""
    if family == "llama":
        save_tokenizer(directory, chat_template=TEMPLATE)
        size = len(json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"])
    else:
        tokenizer = their_tokenizer(280)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(directory)
        size = len(tokenizer)
    model = make_model("llama", vocab_size=size, eos_token_id=2, bos_token_id=1)
    model.generation_config.temperature, model.generation_config.do_sample = 0.4, True
    model.save_pretrained(directory)
    return directory


def prepared_text(out: Path, tokenizer: Tokenizer | None) -> Path:
    out.with_suffix(".txt").write_text("some words, and the dog. " * 300)
    prepare([out.with_suffix(".txt")], out, context=16, tokenizer=tokenizer)
    return out


def founded(tmp_path: Path, model: Path) -> tuple[RunSpec, BlobStore]:
    """A run of the model, and what the founder's home then holds."""
    data = prepared_text(tmp_path / "data", read_tokenizer_json(model))
    import_hugging_face(model, tmp_path / "new", "", replace(TRAINING, data=str(data)))
    spec, given = prepare_run(tmp_path / "new" / "run.toml", tmp_path, lambda *told: None)
    store = BlobStore(tmp_path / "founder" / "blobs")
    store_initial(spec, tmp_path / "new" / "run.toml", store)
    for digest in given.digests():
        store.put_file(given.held(digest))
    return spec, store


def checkpoint_of(spec: RunSpec, run: Path, weights: Path) -> Path:
    paths = [initial_layer_path(weights, layer) for layer in range(layer_count(spec))]
    states = [initial_layer_state(spec, layer, path) for layer, path in enumerate(paths)]
    return save_layers(run / "checkpoints", spec, 0, 0, states)


class Exchange:
    """Fetches from one store, which may not have the blob yet."""

    def __init__(self, store: BlobStore, failures: int = 0) -> None:
        self._store, self._failures = store, failures
        self.fetched: list[str] = []

    async def fetch(self, digest: str, peers: list[str], target: Path, max_bytes: int) -> Path:
        path = self._store.path(digest)
        if path is None or self._failures:
            self._failures -= 1
            raise BlobUnavailable(digest, {})
        assert path.stat().st_size <= max_bytes and peers == ["founder"]
        shutil.copyfile(path, target)
        self.fetched.append(digest)
        return target


def states_of(spec: RunSpec, store: BlobStore, exchange: Exchange) -> InitialStates:
    other: Any = SimpleNamespace(say=lambda *told: None)
    blobs: Any = exchange
    return InitialStates(spec, store, blobs, other, other, lambda: ["founder"])


@pytest.mark.parametrize("family", ["llama", "bytes"])
def test_every_member_exports_as_the_founder_does(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = a_model(tmp_path / "hf", family)
    spec, store = founded(tmp_path, model)
    member = BlobStore(tmp_path / "member" / "blobs")
    initial = parse_initial(store.held(spec.model.initial).read_bytes(), spec)
    assert isinstance(initial.origin, InitialFile) and initial.origin.bytes < 40_000
    exchange = Exchange(store)
    asyncio.run(states_of(spec, member, exchange).keep_beside(lambda: True))
    assert exchange.fetched == [spec.model.initial, initial.origin.digest], "no weights"
    for digest in store.digests():  # the data, which every member has
        if digest not in {file.digest for file in initial.layers}:
            member.put_file(store.held(digest))
    checkpoint = checkpoint_of(spec, tmp_path / "member", tmp_path / "new" / "initial")
    shutil.rmtree(tmp_path / "founder")
    _export_once(tmp_path / "out", checkpoint, ExportFormat.HF, None, False, None)
    _export_once(tmp_path / "of", checkpoint, ExportFormat.HF, tmp_path / "new", False, None)
    assert "--tokenizer-of" not in capsys.readouterr().err
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert {"generation_config.json", "tokenizer_config.json"} <= set(names)
    assert names == sorted(path.name for path in (tmp_path / "of").iterdir())
    for name in names:
        ours, theirs = (tmp_path / place / name for place in ("out", "of"))
        if name == "tokenizer.json":
            assert read_merged(ours) == read_merged(theirs) == read_merged(model / name)
        elif name.endswith(".json"):
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text()), name
        else:
            assert ours.read_bytes() == theirs.read_bytes(), name
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    first = AutoTokenizer.from_pretrained(model)
    assert theirs.chat_template == TEMPLATE and theirs.eos_token == first.eos_token
    assert theirs("the dog words")["input_ids"] == first("the dog words")["input_ids"]
    _export_once(tmp_path / "m.gguf", checkpoint, ExportFormat.GGUF, None, False, None)
    fields = GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE


def test_a_checkpoint_is_named_from_beside_it_and_from_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = founded(tmp_path, a_model(tmp_path / "hf", "llama"))
    checkpoint = checkpoint_of(spec, store.root.parent, tmp_path / "new" / "initial")
    monkeypatch.chdir(checkpoint.parent)
    assert tokenizer_of(Path(checkpoint.name)).vocabulary
    _export_once(tmp_path / "beside", Path(checkpoint.name), ExportFormat.HF, None, False, None)
    monkeypatch.chdir(checkpoint)
    _export_once(tmp_path / "within", Path("."), ExportFormat.HF, None, False, None)
    for name in ("tokenizer.json", "README.md"):
        assert (tmp_path / "beside" / name).read_bytes() == (
            tmp_path / "within" / name
        ).read_bytes()


def read_merged(path: Path) -> dict[str, Any]:
    """A tokenizer.json as the tokenizer's library holds it, whichever way its merges are
    written."""
    content: dict[str, Any] = json.loads(Tokenizers.from_file(str(path)).to_str())
    return content


def test_who_asks_before_it_is_there_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2p_dtfm.daemon.state_transfer.initial_states.RETRY_S", 0.001)
    spec, store = founded(tmp_path, a_model(tmp_path / "hf", "llama"))
    member, asked = BlobStore(tmp_path / "member"), iter([False, False, True])
    states = states_of(spec, member, Exchange(store, failures=3))
    asyncio.run(states.keep_beside(lambda: next(asked)))
    assert travelled(member, spec) is not None


def test_a_run_of_before_goes_on_and_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its initial.json names no such file, and has the same bytes as before."""
    spec, store = founded(tmp_path, a_model(tmp_path / "hf", "llama"))
    initial = parse_initial(store.held(spec.model.initial).read_bytes(), spec)
    before = InitialState(1, initial.layers)
    layers = ",".join(
        f'{{"bytes":{file.bytes},"digest":"{file.digest}"}}' for file in initial.layers
    )
    assert before.to_bytes() == f'{{"format":1,"layers":[{layers}]}}'.encode()
    old = spec.model_copy(
        update={"model": spec.model.model_copy(update={"initial": before.digest()})}
    )
    (tmp_path / "new" / "initial" / "initial.json").write_bytes(before.to_bytes())
    assert len(initial_paths(tmp_path / "new" / "initial", old)) == layer_count(old) + 1
    store.put_bytes(before.to_bytes())
    member = BlobStore(tmp_path / "member" / "blobs")
    exchange = Exchange(store)
    asyncio.run(states_of(old, member, exchange).keep_beside(lambda: True))
    assert exchange.fetched == [old.model.initial] and travelled(member, old) is None
    for digest in store.digests():
        member.put_file(store.held(digest))
    checkpoint = checkpoint_of(old, tmp_path / "member", tmp_path / "new" / "initial")
    _export_once(tmp_path / "out", checkpoint, ExportFormat.HF, None, False, None)
    said = capsys.readouterr().err
    assert "they did not come to this machine" in said and "--tokenizer-of DIR" in said
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_files_of_another_tokenizer_stay_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers of another tokenizer's tokens would mean other tokens."""
    model = a_model(tmp_path / "hf", "llama")
    payload = pack(model, read_tokenizer_json(model))
    assert payload is not None
    (tmp_path / "to").mkdir()
    assert not unpack(payload, ByteTokenizer(), tmp_path / "to")
    assert not list((tmp_path / "to").iterdir())
    spec, store = founded(tmp_path, model)
    other = prepared_text(tmp_path / "other", ByteTokenizer())
    run = tmp_path / "new" / "run.toml"
    (tmp_path / "new" / "tokenizer.json").unlink()
    run.write_text(run.read_text().replace(str(tmp_path / "data"), str(other)))
    spec, given = prepare_run(run, tmp_path, lambda *told: None)
    for digest in given.digests():
        store.put_file(given.held(digest))
    checkpoint = checkpoint_of(spec, tmp_path / "founder", tmp_path / "new" / "initial")
    _export_once(tmp_path / "out", checkpoint, ExportFormat.HF, None, False, None)
    said = capsys.readouterr().err
    assert "trained with another tokenizer" in said and "--tokenizer-of" not in said
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0
    for form in (ExportFormat.HF, ExportFormat.GGUF):
        with pytest.raises(UserError, match="has another tokenizer than the run is trained with"):
            _export_once(tmp_path / "theirs", checkpoint, form, tmp_path / "new", False, None)
    assert not (tmp_path / "theirs").exists()


def test_texts_that_end_with_another_token_than_the_model_states(tmp_path: Path) -> None:
    """Conversations end so with the template of a sibling model. Nothing that read the export
    stopped there."""
    model = a_model(tmp_path / "hf", "llama")
    tokenizer = read_tokenizer_json(model)
    stated = ends_of(model)
    assert tokenizer.end_of_document in stated
    spec, store = founded(tmp_path, model)
    checkpoint = checkpoint_of(spec, store.root.parent, tmp_path / "new" / "initial")
    other = ending_with(tokenizer, 7)
    export_hugging_face(checkpoint, tmp_path / "out", other, origin=model)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["eos_token_id"] == [7, *stated]
    said = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert said["eos_token_id"] == [7, *stated], "by which transformers goes, where there is one"
    assert said["temperature"] == 0.4
    export_gguf(checkpoint, tmp_path / "m.gguf", other, origin=model)
    fields = GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 7
    export_hugging_face(checkpoint, tmp_path / "same", tokenizer, origin=model)
    said = json.loads((tmp_path / "same" / "config.json").read_text())
    assert said["eos_token_id"] == stated[0]


def test_texts_end_though_the_model_states_no_end(tmp_path: Path) -> None:
    """transformers wrote on behind the end with which the run's texts are learnt."""
    model = a_model(tmp_path / "hf", "llama")
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    (model / "generation_config.json").unlink()
    tokenizer = read_tokenizer_json(model)
    spec, store = founded(tmp_path, model)
    checkpoint = checkpoint_of(spec, store.root.parent, tmp_path / "new" / "initial")
    export_hugging_face(checkpoint, tmp_path / "out", tokenizer, origin=model)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["eos_token_id"] == tokenizer.end_of_document == 2 and said["bos_token_id"] == 1


def test_a_link_to_a_file_of_the_founders_stays_behind(tmp_path: Path) -> None:
    """Whoever made the directory had any file of the founder's sent to all members."""
    model = a_model(tmp_path / "model", "llama")
    (tmp_path / "secret").write_text("a key of the founder's")
    (tmp_path / "settings.json").write_text('{"password": "a key of the founder\'s"}')
    (model / "chat_template.jinja").symlink_to(tmp_path / "secret")
    (model / "added_tokens.json").symlink_to(Path("..", "settings.json"))
    told: list[str] = []
    import_hugging_face(model, tmp_path / "new", "", TRAINING, tell=told.append)
    files = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert not any(b"a key of" in path.read_bytes() for path in files)
    behind = [text.split()[0] for text in told if "leads out" in text]
    assert behind == [str(model / it) for it in ("added_tokens.json", "chat_template.jinja")]


def test_texts_end_as_the_models_do_though_its_tokenizer_is_a_link(tmp_path: Path) -> None:
    """As an older hub's program leaves large files of a directory: they lie in its cache. Texts
    that were prepared as `import` says ended with a zero byte, and began with nothing."""
    model = a_model(tmp_path / "model", "llama")
    (model / "tokenizer.json").rename(tmp_path / "in-the-cache")
    (model / "tokenizer.json").symlink_to(tmp_path / "in-the-cache")
    told: list[str] = []
    import_hugging_face(model, tmp_path / "new", "", TRAINING, tell=told.append)
    tokenizer = read_tokenizer_json(tmp_path / "new" / "tokenizer.json")
    assert (tokenizer.end_of_document, tokenizer.start_of_document) == (2, 1)
    assert not any("leads out" in text for text in told)


def test_where_what_says_how_texts_end_stays_behind_the_models_directory_is_named(
    tmp_path: Path,
) -> None:
    model = a_model(tmp_path / "model", "llama")
    configuration = json.loads((model / "config.json").read_text()) | {"eos_token_id": None}
    (model / "config.json").write_text(json.dumps(configuration))
    (model / "generation_config.json").unlink()
    links = tmp_path / "links"
    links.mkdir()
    for path in model.iterdir():
        (links / path.name).symlink_to(path)
    for directory in (model, links):
        out, told = tmp_path / f"from-{directory.name}", list[str]()
        import_hugging_face(directory, out, "it", TRAINING, tell=told.append)
        end = read_tokenizer_json(out / "tokenizer.json").end_of_document
        says = any(f"--tokenizer {directory}" in text for text in told)
        assert (end == 2) != says, (end, told)
    assert read_tokenizer_json(links).end_of_document == 2


def test_the_links_of_the_hubs_cache_lead_to_its_own_files(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model", "llama")
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "main", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    told: list[str] = []
    import_hugging_face(snapshot, tmp_path / "linked", "it", TRAINING, tell=told.append)
    import_hugging_face(model, tmp_path / "plain", "it", TRAINING)
    linked, plain = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.json*")}
        for name in ("linked", "plain")
    )
    assert linked == plain
    assert not any("leads out" in text for text in told)


def test_what_comes_to_too_much_stays_with_the_founder(tmp_path: Path) -> None:
    model = a_model(tmp_path / "hf", "llama")
    (model / "added_tokens.json").write_text(json.dumps({"x" * (5 << 20): 1}))
    told: list[str] = []
    spec = import_hugging_face(model, tmp_path / "new", "", TRAINING, tell=told.append)
    assert "come to more than" in " ".join(told)
    assert not (tmp_path / "new" / "initial" / "origin.json").exists()
    assert model_in(tmp_path / "new").spec == spec


def test_neither_code_nor_places_nor_what_is_no_json_travels(
    tmp_path: Path,
) -> None:
    model = a_model(tmp_path / "hf", "llama")
    path = model / "tokenizer_config.json"
    stated = json.loads(path.read_text()) | {
        "auto_map": {"AutoTokenizer": "theirs.Tokenizer"},
        "name_or_path": "/home/somebody/models",
        "special_tokens_map_file": "/home/somebody/.cache/special_tokens_map.json",
    }
    path.write_text(json.dumps(stated))
    (model / "special_tokens_map.json").write_text("no table")
    tokenizer = read_tokenizer_json(model)
    payload = pack(model, tokenizer)
    assert payload is not None and b"auto_map" not in payload and b"no table" not in payload
    assert b"somebody" not in payload, "where the founder keeps files"
    assert unpack(payload, tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "</s>"


def packed(tokenizer: Tokenizer, **changes: Any) -> bytes:
    values = {"format": 1, "tokenizer": digest_bytes(tokenizer.to_bytes()), "files": {}}
    return msgspec.json.encode(values | changes)


@pytest.mark.parametrize(
    "changes, cause",
    [
        ({"files": {"../../.bashrc": "{}"}}, "of the name"),
        ({"files": {"modeling_theirs.py": "import os"}}, "of the name"),
        ({"files": {"config.json": "no"}}, "is not JSON"),
        ({"files": {"config.json": "[1]"}}, "no table"),
        ({"files": {"config.json": "[" * 100_000}}, "is not JSON"),
        ({"files": {"chat_template.jinja": "a\0b"}}, "zero bytes"),
        ({"files": {"tokenizer.json": "{}"}}, "is not one of a model"),
        ({"files": {"tokenizer.json": '{"model": {"vocab": [1]}}'}}, "is not one of a model"),
        ({"files": {"tokenizer.json": '{"model": {"vocab": {"a": "b"}}}'}}, "not one of a model"),
        (
            {"files": {"tokenizer.json": json.dumps({"model": {"vocab": {}}, "decoder": SLOW})}},
            "a pattern of its own",
        ),
        ({"format": 2}, "of format 2"),
        ({"more": 1}, "not a model's own files"),
        ({"files": {"chat_template.jinja": "x" * (5 << 20)}}, "limit"),
        ({"files": {"config.json": 1}}, "not a model's own files"),
    ],
)
def test_a_strangers_file_is_checked_before_anything_is_written(
    changes: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    tokenizer = read_tokenizer_json(save_tokenizer(tmp_path / "hf"))
    (tmp_path / "to").mkdir()
    with pytest.raises(PeerFault, match=cause):
        unpack(packed(tokenizer, **changes), tokenizer, tmp_path / "to")
    assert not list((tmp_path / "to").iterdir())


def test_halves_of_characters_hold_up_no_export(tmp_path: Path) -> None:
    """JSON may name such halves, and UTF-8 has none. A founder's file ended every member's
    `export`."""
    model = a_model(tmp_path / "hf", "llama")
    (model / "generation_config.json").write_text('{"auto_map": {}, "note": "\\ud800 and \u00fc"}')
    tokenizer = read_tokenizer_json(model)
    payload = pack(model, tokenizer)
    assert payload is not None
    (tmp_path / "to").mkdir()
    assert unpack(payload, tokenizer, tmp_path / "to")
    assert read_noted(tmp_path / "to" / "generation_config.json") == "\ud800 and \u00fc"
    files = {"tokenizer.json": '{"model": {"vocab": {}}, "note": "\\ud83d"}'}
    assert unpack(packed(tokenizer, files=files), tokenizer, tmp_path / "to")
    assert read_noted(tmp_path / "to" / "tokenizer.json") == "\ud83d"


def test_what_is_nested_without_end_holds_up_no_export(tmp_path: Path) -> None:
    """Python 3.12 reads such nesting, and cannot write it."""
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(PeerFault, match="nested too deeply"):
        _written({"eos_token_id": deep}, indent=2)
    (tmp_path / "config.json").write_text('{"eos_token_id": [[1]], "bos_token_id": 2}')
    assert special_tokens(tmp_path) == {"bos_token_id": 2}


def read_noted(path: Path) -> str:
    return str(json.loads(path.read_text("utf-8"))["note"])


def test_its_size_is_bounded_before_it_is_fetched(tmp_path: Path) -> None:
    spec, store = founded(tmp_path, a_model(tmp_path / "hf", "llama"))
    initial = parse_initial(store.held(spec.model.initial).read_bytes(), spec)
    large = InitialState(1, initial.layers, InitialFile("ab" * 32, 5 << 20))
    named = spec.model_copy(
        update={"model": spec.model.model_copy(update={"initial": large.digest()})}
    )
    with pytest.raises(PeerFault, match="besides its layers"):
        parse_initial(large.to_bytes(), named)
    (tmp_path / "new" / "initial" / "origin.json").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        initial_paths(tmp_path / "new" / "initial", spec)
    assert OriginFiles.__struct_fields__ == ("format", "tokenizer", "files")

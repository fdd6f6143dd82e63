"""An imported model goes on in its own tokens: data of others are refused."""

import json
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.peers.run_source import prepare_run
from p2p_dtfm.train.data import Tokenizer, prepare
from p2p_dtfm.train.hugging_face.export import export_hugging_face
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from p2p_dtfm.train.hugging_face.tokenizer_json import read_tokenizer_json
from p2p_dtfm.train.model.checkpoint import save_layers
from tests.models.conftest import make_spec, random_states
from tests.models.test_hugging_face import gpt2_like_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory of Hugging Face's, with a byte-pair tokenizer."""
    spec = make_spec(vocabulary=288, layers=1)
    checkpoint = save_layers(tmp_path / "checkpoints", spec, 0, 0, random_states(spec))
    export_hugging_face(checkpoint, tmp_path / "model", None)
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(gpt2_like_tokenizer()))
    return tmp_path / "model"


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

"""Names and files as they come from other machines: in another encoding, or with a mark in front
that no editor shows. Nothing of them ends in a traceback, or leaves something half done."""

import json
import os
from pathlib import Path

import pytest

from p2p_dtfm.cli.commands.here import service
from p2p_dtfm.cli.commands.models import told_of
from p2p_dtfm.cli.terminal.mistyped import lines_for
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.settings import resolve
from p2p_dtfm.sim.scenario.files import find_run_spec, read_run_spec
from p2p_dtfm.train.data import load_manifest, open_prepared, prepare
from p2p_dtfm.train.data.saved_data_sets import data_set_files
from p2p_dtfm.train.hugging_face.export import export_hugging_face
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from tests.cli.test_odd_surroundings import typed
from tests.models.conftest import make_spec, random_states
from tests.train.saved_layers import save_layers

LATIN = os.fsdecode(b"caf\xe9")
"""A name of an old disk."""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    texts = tmp_path / "my texts"
    texts.mkdir()
    (texts / "a.txt").write_text("some words " * 2000)
    return texts


def test_a_run_spec_from_an_editor_that_puts_a_mark_in_front(tmp_path: Path) -> None:
    """It was said to be no valid TOML in line 1, where nothing can be seen. Scenarios were read."""
    text = find_run_spec("tiny").read_bytes()
    (marked := tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + text)
    spec = read_run_spec(marked)
    assert spec.name == "tiny"
    values = json.dumps(spec.model_dump(mode="json")).encode()
    (as_json := tmp_path / "run.json").write_bytes(b"\xef\xbb\xbf" + values)
    assert read_run_spec(as_json).digest() == spec.digest()
    (settings := tmp_path / "settings.toml").write_bytes(b"\xef\xbb\xbfthreads = 3\n")
    assert resolve(settings, {}).settings.threads == 3


def test_a_source_that_is_no_text(tmp_path: Path) -> None:
    """`plan` and `--run` ended with a traceback of the encoder."""
    values = make_spec().model_dump(mode="json")
    values["data"]["source"] = "caf\udce9"
    (path := tmp_path / "run.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="source is no text"):
        read_run_spec(path)


def test_data_that_no_run_spec_can_name(texts: Path, tmp_path: Path) -> None:
    """The run spec could not be written, or, with a letter that TOML does not take, not be read
    again: the import ended with a traceback, in the second case with all that it had made."""
    spec = make_spec()
    made = save_layers(tmp_path / "checkpoints", spec, 0, 0, random_states(spec))
    export_hugging_face(made, model := tmp_path / "model", None)
    for name in (LATIN, "rub\x7fout"):
        prepare([texts], tmp_path / name, context=16)
        training = Training(str(tmp_path / name), 10, 8, 2, 1e-4)
        if name == LATIN:
            with pytest.raises(UserError, match="no run spec can name"):
                import_hugging_face(model, tmp_path / "latin", "", training)
            assert not (tmp_path / "latin").exists()
        else:
            spec = import_hugging_face(model, tmp_path / "rubout", "", training)
            assert spec.data.source == str(tmp_path / name)


def test_a_service_whose_home_no_settings_can_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The installation ended with a traceback, and left an empty file of settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(service, "_program", lambda: "/opt/p2p-dtfm")
    words = ["service", "install", "--home", str(tmp_path / LATIN), "--initial-peers", "/ip4/1"]
    assert typed(*words, monkeypatch=monkeypatch) == 2
    assert "--home cannot be written into the settings" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_no_daemon_could_tell_of(tmp_path: Path) -> None:
    """It trained there, but `status` was answered 500, and a pause ended it with a traceback."""
    with pytest.raises(UserError, match="its name is no text in UTF-8"):
        Home(tmp_path / LATIN).acquire()
    assert list(tmp_path.iterdir()) == []
    (there := tmp_path / LATIN).mkdir()
    (tmp_path / "link").symlink_to(there)
    home = Home(tmp_path / "link")
    home.acquire()
    home.release()


def test_somebody_whose_name_is_no_text_is_not_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with a traceback before the daemon was asked."""
    assert typed("revoke", LATIN, "--home", str(tmp_path), monkeypatch=monkeypatch) == 4


def test_settings_with_a_zero_byte(tmp_path: Path) -> None:
    (settings := tmp_path / "settings.toml").write_text('home = "a\\u0000b"\n')
    with pytest.raises(UserError, match=r"home .*: must be the path of a directory"):
        resolve(settings, {})


def test_a_damaged_line_of_the_history_keeps_no_model_here(tmp_path: Path) -> None:
    """`export` ended with a traceback, where `compare` counted the line as one that is damaged."""
    spec, run = make_spec(), tmp_path / "run"
    made = save_layers(run / "checkpoints", spec, 0, 0, random_states(spec))
    odd = [None, "x", 1e400, [], {}, True]
    lines = [{"event": "step", "step": step, "loss": 3.0} for step in odd]
    lines += [{"event": "step", "step": 0, "loss": loss, "held_out_loss": 2.0} for loss in odd]
    lines += [{"event": "view", "members": members} for members in (5, [[]], ["peer"])]
    (run / "events.jsonl").write_text("\n".join(map(json.dumps, lines)))
    told = told_of(made)
    assert list(told.members) == ["peer"] and list(told.held_out) == [(0, 2.0)]
    assert not told.losses
    export_hugging_face(made, tmp_path / "out", None, told=told)


def test_text_is_not_taken_for_prepared_data(texts: Path) -> None:
    """Who named the directory of texts as `data.source` was told that its manifest is missing, and
    to make the data anew in that directory, where `prepare` refuses to write."""
    with pytest.raises(UserError, match="no prepared data in") as caught:
        open_prepared(texts)
    first, second = caught.value.fixes
    made = texts.with_name("my texts-data")
    assert first == f"make them: p2p-dtfm prepare '{texts}' --out '{made}'"
    assert second == f'then say source = "{made}"'


def test_lines_to_type_hold_for_names_with_spaces(tmp_path: Path) -> None:
    """Who pasted the fix made data in another directory, or was told that --out is missing."""
    (made := tmp_path / "my data").mkdir()
    with pytest.raises(UserError) as caught:
        open_prepared(tmp_path / "my other data")
    assert caught.value.fixes[0].endswith("my other data'")
    with pytest.raises(UserError) as caught:
        load_manifest(made / "manifest.json")
    assert f"p2p-dtfm prepare PATH... --out '{made}' --overwrite" in caught.value.fixes[-1]
    (splits := tmp_path / "my set").mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    with pytest.raises(UserError) as caught:
        data_set_files(splits, {"dataset_dict.json"})
    line = f"prepare '{splits}/train' --validation '{splits}/validation' --out DIR"
    assert caught.value.fixes == (f"name them: p2p-dtfm {line}",)
    assert lines_for("my run.toml", ())[0].endswith("p2p-dtfm --run 'my run.toml'")

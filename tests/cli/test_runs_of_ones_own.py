"""A user's own run spec names its data, and its initial weights, relative to itself. What is made
of the spec lies elsewhere, and means the same."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import Tensor
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands.models import _source
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.before_start import data_directory
from p2p_dtfm.daemon.state_transfer.initial_states import store_initial
from p2p_dtfm.sim.scenario.files import find_run_spec, read_run_spec
from p2p_dtfm.testbed.local_swarm import LocalSwarm
from p2p_dtfm.train.data import STANDARD_LIBRARY, BlobStore, open_prepared, prepare
from p2p_dtfm.train.data.prepare import TOKENIZER_NAME
from p2p_dtfm.train.model.initial_state import write_initial
from p2p_dtfm.train.model.layer_state import LayerState

STARTS = "that is enough"


def own_run(folder: Path) -> Path:
    """A run spec with data beside it, and with initial weights as `import` makes them."""
    folder.mkdir()
    text, path = folder / "text", folder / "my-run.toml"
    text.write_text("words of somebody " * 200)
    prepare([text], folder / "my-data", context=48)
    told = find_run_spec("tiny").read_text().replace(f'"{STANDARD_LIBRARY}"', '"my-data"')
    path.write_text(told)
    spec = read_run_spec(path)

    def parameters(layer: int) -> Iterable[Tensor]:
        return LayerState.genesis(spec, layer).module.parameters()

    digest = write_initial(folder / "initial", spec, parameters).digest()
    (folder / TOKENIZER_NAME).write_bytes((folder / "my-data" / TOKENIZER_NAME).read_bytes())
    path.write_text(told.replace("[model]", f'[model]\ninitial = "{digest}"'))
    return path


LINES = ["demo --steps 40", "demo --audit 0.5", "chaos", "chaos --storm", "chaos --lie scale"]


@pytest.mark.parametrize("line", LINES)
def test_a_swarm_that_plays_it_founds_it_with_its_data_and_weights(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, founded = own_run(tmp_path / "mine"), []

    def found(swarm: LocalSwarm, arguments: list[str], *rest: object) -> None:
        copy = Path(arguments[arguments.index("--run") + 1])
        spec = read_run_spec(copy)
        open_prepared(data_directory(spec, copy))
        store_initial(spec, copy, BlobStore(tmp_path / "store"))
        founded.append((copy.parent / TOKENIZER_NAME).read_bytes())
        raise UserError(STARTS, "go on")

    monkeypatch.setattr(LocalSwarm, "found", found)
    monkeypatch.chdir(path.parent)
    done = CliRunner().invoke(app, [*line.split(), "--run", path.name])
    assert isinstance(done.exception, UserError) and done.exception.cause == STARTS, done.exception
    assert founded == [(path.parent / TOKENIZER_NAME).read_bytes()]


@pytest.mark.parametrize("line", ["demo", *LINES])
def test_a_run_by_invitation_is_not_played(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The founder of such a run prints no address. The program that played it waited five minutes
    for one."""
    path = tmp_path / "run.toml"
    path.write_text(find_run_spec("tiny").read_text() + '\n[admission]\nmode = "invited"\n')

    def start(*rest: object) -> None:
        raise AssertionError("a daemon is started")

    monkeypatch.setattr(LocalSwarm, "start", start)
    done = CliRunner().invoke(app, [*line.split(), "--run", str(path)])
    assert isinstance(done.exception, UserError), done.exception
    assert done.exception.cause.startswith("the run tiny is by invitation")
    assert 'without mode = "invited"' in done.exception.fixes[0]


ADVICE = ["plan", "three-homes", "--run", "mine.toml", "--advise", "--vary", "reduction", "--out"]


def test_what_is_advised_finds_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = find_run_spec("gpt2-small").read_text()
    Path("mine.toml").write_text(told.replace('"data/text"', '"my-data"'))
    Path("elsewhere").mkdir()
    done = CliRunner().invoke(app, [*ADVICE, "elsewhere/first.toml"])
    assert done.exit_code == 0, done.output
    assert read_run_spec("elsewhere/first.toml").data.source == "my-data", "none are there yet"
    Path("text").write_text("words of somebody " * 200)
    prepare([Path("text")], Path("my-data"))
    for out in (Path("elsewhere/advised.toml"), Path("beside.toml")):
        done = CliRunner().invoke(app, [*ADVICE, str(out)])
        assert done.exit_code == 0, done.output
        open_prepared(data_directory(read_run_spec(out), out))
    assert read_run_spec("beside.toml").data.source == "my-data"


def test_what_is_advised_stays_beside_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = find_run_spec("gpt2-small").read_text()
    Path("mine.toml").write_text(told.replace("[model]", f'[model]\ninitial = "{"ab" * 32}"'))
    Path("elsewhere").mkdir()
    done = CliRunner().invoke(app, [*ADVICE, "elsewhere/advised.toml"])
    assert isinstance(done.exception, UserError)
    assert "weights that lie beside its run spec" in done.exception.cause
    assert done.exception.fixes == ("have it written there: --out advised.toml",)
    assert not Path("elsewhere/advised.toml").exists()


def test_data_of_an_imported_model_lie_where_they_were_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--data=~/text` was a folder named `~` below the one that the user was in, and an empty
    value was that one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _source("~/text") == str(tmp_path / "text")
    assert _source("text") == str(Path("text").absolute())
    with pytest.raises(UserError, match="--data stands without a value"):
        _source("")

"""An option that would change nothing is refused, and the refusal names what it goes with. None is
dropped without a word."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.core.protocol.errors import UserError


@pytest.mark.parametrize(
    ("typed", "cause"),
    [
        ("prepare TEXT --out OUT --similarity 0.5", "--similarity goes with --deduplicate near"),
        (
            "prepare TEXT --out OUT --similarity 0.5 --deduplicate exact",
            "--similarity goes with --deduplicate near",
        ),
        (
            "prepare TEXT --out OUT --conversations --similarity 0.5",
            "conversations are prepared without --similarity",
        ),
        (
            "prepare TEXT --out OUT --conversations --similarity 0",
            "conversations are prepared without --similarity",
        ),
        (
            "prepare TEXT --out OUT --validation TEXT --held-out 0.1",
            "--validation names what is held out: --held-out does not go with it",
        ),
        (
            "prepare TEXT --out OUT --validation TEXT --held-out-by-document",
            "--validation names what is held out: --held-out-by-document does not go with it",
        ),
        ("export --out OUT --keep 5", "--keep goes with --every"),
        (
            "export --out OUT --format safetensors --tokenizer-of OUT",
            "--format safetensors holds parameters alone: --tokenizer-of does not go with it",
        ),
        ("simulate three-homes --seed 5", "--seed goes with --plan random"),
        (
            "plan three-homes --run tiny --ids",
            "--ids is of the swarm of a daemon, and a scenario is named",
        ),
        (
            "plan three-homes --advise --home OUT",
            "--home is of the swarm of a daemon, and a scenario is named",
        ),
        ("pause --for 31d", "a pause that ends by itself lasts 30 days at most"),
        ("bootstrap --run-digest ab", "--run-digest goes with --public-status"),
        ("doctor --run-digest ab", "--run-digest goes with --initial-peers"),
    ],
)
def test_it_is_refused_before_anything_is_done(typed: str, cause: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("words of somebody " * 200)
    places = {"TEXT": str(text), "OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in typed.split()]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError), done.output
    assert done.exception.cause == cause and done.exception.fixes
    assert not (tmp_path / "out").exists()


def test_what_goes_together_is_taken(tmp_path: Path) -> None:
    text, held_out = tmp_path / "text", tmp_path / "held-out"
    text.write_text("words of somebody " * 200)
    held_out.write_text("others of somebody else " * 200)
    common = ["prepare", str(text), "--context", "16", "--validation", str(held_out)]
    done = CliRunner().invoke(app, [*common, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output

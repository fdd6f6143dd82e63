"""README.md of an export has what the home knows of the run, and nothing else."""

import json
from pathlib import Path

from p2p_dtfm.cli.commands.models import told_of
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.data.manifest import Notes
from p2p_dtfm.train.hugging_face.export import export_hugging_face
from p2p_dtfm.train.hugging_face.model_card import KnownOfModel, model_card
from tests.models.conftest import make_spec, random_states
from tests.train.saved_layers import save_layers


def write_history(run: Path) -> None:
    def step(number: int, loss: float, held_out: float | None = None) -> dict[str, object]:
        return {"event": "step", "step": number, "loss": loss, "held_out_loss": held_out}

    events = [
        {"event": "view", "members": ["one", "two"]},
        step(0, 4.0),
        step(0, 3.5, 3.25),  # the step was repeated after a failure: this one stayed
        step(7, 1.0),  # this one is later than the checkpoint
        {"event": "view", "members": ["one", "three"]},
    ]
    lines = [json.dumps(event) for event in events]
    (run / "events.jsonl").write_text("\n".join(lines) + '\n{"event": "st')


def test_the_card_says_what_the_home_knows(tmp_path: Path) -> None:
    spec = make_spec()
    saved = save_layers(tmp_path / "run" / "checkpoints", spec, 0, 640, random_states(spec))
    write_history(tmp_path / "run")
    told = told_of(saved)
    assert told.tokens == 640 and told.members == ["one", "three", "two"]
    assert told.losses == [(0, 3.5)] and told.held_out == [(0, 3.25)]
    export_hugging_face(saved, tmp_path / "out", None, told=told)
    card = (tmp_path / "out" / "README.md").read_text()
    assert spec.digest() in card and "| tokens | 640 |" in card and "- `three`" in card
    assert "| licence | not stated |" in card and "1.0000" not in card


def test_a_founders_words_stay_words() -> None:
    spec: RunSpec = make_spec()
    notes = Notes("a | b\n# big", "[MIT](https://x)", "")
    card = model_card(spec, 3, KnownOfModel(notes=notes))
    assert "| name | a \\| b \\# big |" in card and "\\[MIT\\]" in card
    assert "## Loss" not in card and "## Members" not in card


def test_a_long_curve_is_cut_to_a_few_rows() -> None:
    curve = [(step, 1.0) for step in range(1000)]
    card = model_card(make_spec(), 1000, KnownOfModel(losses=curve))
    assert card.count("training, step") == 12
    assert "training, step 0 |" in card and "training, step 999 |" in card

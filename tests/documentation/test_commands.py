"""Every command of the pages, typed as it stands there."""

from pathlib import Path

import pytest

from tests.conftest import DemoRun
from tests.documentation.pages import blocks_of
from tests.documentation.typist import Typist


@pytest.fixture
def typist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_run: DemoRun) -> Typist:
    return Typist(tmp_path, monkeypatch, demo_run)


def test_models_in_and_out(typist: Typist) -> None:
    blocks = blocks_of("docs/models-in-and-out.md")
    assert len(blocks) == 6
    for block in blocks:
        typist.type(block)
    assert (typist.directory / "finest" / "run.toml").is_file()
    homes = typist.directory / "finer-home"
    assert list(homes.glob("runs/*/checkpoints/step-00000020/manifest.json"))

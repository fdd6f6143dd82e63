"""PreparedData data that tests with real daemons share."""

import argparse
from pathlib import Path

import pytest

from p2p_dtfm.train.data import prepare


@pytest.fixture(scope="session")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus, in a few shards."""
    directory = tmp_path_factory.mktemp("data")
    text = Path(argparse.__file__).read_text()
    (directory / "text.py").write_text(text)
    out = directory / "prepared"
    notes = {"name": "one module", "licence": "PSF-2.0", "source": "https://python.org"}
    prepare([directory / "text.py"], out, context=32, shard_tokens=40_000, **notes)
    return out

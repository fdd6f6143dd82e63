"""What all tests share."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# Two cores and several daemons: threads of torch that wait for one another would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"


@dataclass(frozen=True)
class DemoRun:
    """A demo that has ended, which several tests look at."""

    done: subprocess.CompletedProcess[str]
    directory: Path
    """Homes, logs and checkpoints. Tests copy what they would change."""


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """`p2p-dtfm demo --steps 40 --keep DIR`, said as JSON."""
    directory = tmp_path_factory.mktemp("demo") / "trained"
    command = [sys.executable, "-m", "p2p_dtfm", "demo", "--steps", "40", "--json"]
    done = subprocess.run(
        [*command, "--keep", str(directory)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return DemoRun(done, directory)


SLOW_FIRST = ("test_chaos", "test_daemons", "e2e", "documentation", "models")
"""Swarms of daemons wait much and compute little: begun first, they fill the time of the rest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slowest files first, so that all workers end at about the same time."""

    def rank(item: pytest.Item) -> int:
        parts = {*item.path.parts, item.path.stem}
        return next((n for n, name in enumerate(SLOW_FIRST) if name in parts), len(SLOW_FIRST))

    items.sort(key=rank)  # stable: files stay whole and in order
    if "NIGHTLY" not in os.environ:
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="takes long: make nightly"))

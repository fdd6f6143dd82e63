"""What all tests share."""

import fcntl
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is slow, and that is no fault of what is tested.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
# Two cores and several daemons: threads of torch that wait for one another would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Hundreds of daemons and commands would each compile hundreds of modules again, for a second or so
# of computing, and every worker of pytest all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Restore the log afterwards. A command called in this process changes the log until it ends,
    and later tests here listen to the log."""
    log = logging.getLogger("p2p_dtfm")
    level, propagate, handlers = log.level, log.propagate, list(log.handlers)
    yield
    log.setLevel(level)
    log.propagate = propagate
    log.handlers = handlers


@dataclass(frozen=True)
class DemoRun:
    """A demo that has ended. Several tests look at it."""

    done: subprocess.CompletedProcess[str]
    directory: Path
    """Its homes, logs and checkpoints. A test copies what it would change."""


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """`p2p-dtfm demo --steps 40 --keep DIR`, reported as JSON: once for all of pytest's workers."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    directory, result = shared / "demo" / "trained", shared / "demo" / "done.json"
    result.parent.mkdir(exist_ok=True)
    with (shared / "demo" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go of when the file is closed, or its process ends
        if not result.exists():
            result.write_text(json.dumps(_run_demo(directory)))
    return DemoRun(subprocess.CompletedProcess(**json.loads(result.read_text())), directory)


def _run_demo(directory: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "p2p_dtfm", "demo", "--steps", "40", "--json"]
    command += ["--keep", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {"args": command, "returncode": 0, "stdout": done.stdout, "stderr": done.stderr}


SLOW_FIRST = (
    *("test_daemons", "test_good_neighbour", "test_virtual_lies_in_pipelines"),
    *("test_virtual_whispers", "test_virtual_lies", "test_bad_input", "test_shaping"),
    *("test_browser", "test_parity", "test_installed_wheel", "test_half_frames"),
    *("test_direct_lines", "test_commands", "test_open_tabs", "e2e", "testbed", "sim", "models"),
    "test_architecture",
)
"""Files, and folders, in the order of their durations. No file is divided between workers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first, so that all workers end at about the same time. All workers
    would wait for a file of four minutes that began last."""

    def rank(item: pytest.Item) -> int:
        parts = {*item.path.parts, item.path.stem}
        return next((n for n, name in enumerate(SLOW_FIRST) if name in parts), len(SLOW_FIRST))

    items.sort(key=rank)  # stable: files stay whole and in order
    if "NIGHTLY" not in os.environ:
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="takes long: make nightly"))

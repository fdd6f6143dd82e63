"""What tests with real daemons share."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from p2p_dtfm.testbed.local_swarm import Child
from p2p_dtfm.testbed.swarm_directory import writes_below
from tests.core.builders import run_spec
from tests.documentation.error_messages import PAGE, heading_of
from tests.forked import run_to_its_end

Program = Callable[..., tuple[int, str, str]]
DEADLINE_S = 240.0
"""The deadline is long, since a busy machine is no reason to fail; what succeeds waits for
nothing."""
ENDS_WITHIN_S = 10.0


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition()` is true; fail with `what` if it does not come true in time."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"did not happen within {deadline_s} s: {what}"
        time.sleep(0.05)


def write_spec(directory: Path, **changes: object) -> Path:
    path = directory / "run.json"
    path.write_text(run_spec(**changes).model_dump_json())
    return path


def write_endless_spec(directory: Path, **changes: object) -> Path:
    """A small model that trains until it is stopped."""
    return write_spec(
        directory,
        total_steps=100_000,
        model={"layers": 4, "width": 64, "heads": 2, "context": 64, "vocabulary": 256},
        evaluation={"every_steps": 10_000, "sequences": 4},
        optimizer={"peak_learning_rate": 2e-4, "warmup_steps": 20},
        **changes,
    )


def losses(child: Child) -> dict[int, float]:
    events = [event for event in child.events() if event["event"] == "step"]
    return {event["step"]: event["loss"] for event in events if event["loss"] is not None}


def step_of(child: Child) -> int:
    return max(losses(child), default=-1)


def safe_of(child: Child) -> int:
    """Steps that a crash of one peer cannot take back, as the daemon says itself."""
    facts = child.status()
    return -1 if facts is None or facts["safe_step"] is None else int(facts["safe_step"])


def logged(child: Child, text: str) -> bool:
    return text in (child.home / "stderr").read_text(errors="replace")


def shards_of(child: Child) -> set[str]:
    """Names of the run's files that a daemon has."""
    return {path.name for path in child.home.glob("runs/*/blobs/*") if path.name[0] != "."}


def state_of(child: Child) -> tuple[str, str]:
    """(state, reason), empty while the daemon cannot be asked."""
    facts = child.status()
    return (facts["state"], facts["reason"]) if facts else ("", "")


def takes_part(child: Child) -> bool:
    """Whether the daemon is in a view. Where the plan is faster without it, it is a spare there."""
    return state_of(child)[0] in ("training", "spare")


def run_program(
    *arguments: str | Path, deadline_s: float = DEADLINE_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `p2p-dtfm` with these arguments, to its end. It must show no traceback, and the
    documentation must explain an error."""
    done = run_to_its_end(arguments, deadline_s, environment)
    assert "Traceback" not in done.stderr, done.stderr
    assert_errors_are_explained(done.stderr)
    return done


def assert_errors_are_explained(told: str) -> None:
    """The documentation has each error that a user is told."""
    for line in told.splitlines():
        if line.startswith("error: "):
            assert heading_of(line.removeprefix("error: ")), f"not in {PAGE}: {line}"


def errors_of(done: subprocess.CompletedProcess[str]) -> str:
    """The error and its fixes, without the log before it."""
    return done.stderr[done.stderr.index("error: ") :]


def processes_of(directory: Path) -> list[list[str]]:
    """Command lines of living processes that name this directory, or write their output there."""
    return [
        process.info["cmdline"]
        for process in psutil.process_iter(["pid", "cmdline"])
        if str(directory) in " ".join(process.info["cmdline"] or ())
        or writes_below(process.info["pid"], directory)
    ]


def assert_nothing_is_left(directory: Path) -> None:
    """No process is left; the p2pd of a killed daemon ends by itself, within a moment."""
    wait_until(lambda: not processes_of(directory), "no process is left", ENDS_WITHIN_S)


def first_json(text: str) -> dict:
    return json.loads(text.splitlines()[0])

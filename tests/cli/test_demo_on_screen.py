"""What a demo says at its end, and what it leaves."""

import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from p2p_dtfm.cli.commands.demo import _summary
from p2p_dtfm.cli.scenarios.told_to_end import as_by_ctrl_c


def test_of_a_single_step_no_speed_is_told() -> None:
    """A single step has no time between steps. The demo ended with a traceback instead of a
    summary."""
    result = {
        "shaped_links": False,
        "emulated": False,
        "steps": 1,
        "peers": 2,
        "training_s": 0.0,
        "first_loss": 5.5,
        "last_loss": 5.5,
        "held_out_loss": 5.4,
        "tokens_per_s": None,
        "views": [],
        "agreed": True,
        "processes_left": 0,
    }
    console = Console(file=StringIO(), width=200)
    _summary(console, result, None, None)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 step by 2 peers" in told and "tokens/s" not in told


def test_a_second_word_does_not_cut_short_what_the_first_one_began() -> None:
    """A shell tells of a terminal that is closed, and so does the kernel."""
    has_cleaned_up = False
    with pytest.raises(KeyboardInterrupt), as_by_ctrl_c():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            has_cleaned_up = True
    assert has_cleaned_up


BEGUN = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
from p2p_dtfm.testbed.local_swarm import LocalSwarm
def found(*rest, **more):
    print("begins", flush=True)
    time.sleep(600)
LocalSwarm.found = found
from p2p_dtfm.cli import main
main()
"""
"""A demo whose founder takes its time. Who runs tests in the background may ignore some signals."""


@pytest.mark.parametrize("command", ["demo", "chaos"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_however_it_is_told_to_end_nothing_is_left(
    command: str, number: signal.Signals, tmp_path: Path
) -> None:
    """Whoever closed its terminal had homes and checkpoints of it among the temporary files for
    good."""
    with subprocess.Popen(
        [sys.executable, "-c", BEGUN, command, "--peers", "3"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() not in ("begins\n", ""):
            pass
        assert any(tmp_path.iterdir())
        process.send_signal(number)
        assert process.wait(60) == 130, process.stderr.read()
        assert "Traceback" not in process.stderr.read()
    assert not any(tmp_path.iterdir())

"""A command is loaded when it is typed: on a slow machine all of them together take seconds."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

from p2p_dtfm.cli.app import MODULES, app

LOADED_BY = """
import sys
from p2p_dtfm.cli import main
try:
    main()
except SystemExit:
    print(*sorted(name for name in sys.modules if name.startswith("p2p_dtfm.")))
"""


def loaded_by(*line: str) -> set[str]:
    ran = subprocess.run(
        [sys.executable, "-c", LOADED_BY, *line], capture_output=True, text=True, timeout=120
    )
    return set(ran.stdout.splitlines()[-1].split())


def test_who_asks_for_a_status_does_not_wait_for_what_simulates(tmp_path: Path) -> None:
    for word in ("status", "leave"):
        loaded = loaded_by(word, "--home", str(tmp_path))
        assert "p2p_dtfm.cli.commands.swarm" in loaded
        rooms = {name.split(".")[1] for name in loaded}
        assert not rooms & {"testbed", "sim", "train", "net"}, word


def test_what_help_lists_is_what_there_is() -> None:
    program: Any = typer.main.get_command(app)
    context = program.make_context("p2p-dtfm", ["--help"], resilient_parsing=True)
    listed = program.list_commands(context)
    assert listed == list(MODULES)
    assert all(program.get_command(context, name) is not None for name in listed)
    assert program.commands.keys() == MODULES.keys(), "a module registers what no line can name"

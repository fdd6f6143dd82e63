"""An order to the daemons of one machine's devices goes to each, whatever one of them answers."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import p2p_dtfm.cli.commands.swarm as commands
from p2p_dtfm.cli.app import app
from p2p_dtfm.core.protocol.errors import UserError


@pytest.mark.parametrize("order", ["pause", "pause --for 2h", "resume", "leave"])
def test_one_that_refuses_keeps_no_order_from_the_others(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first daemon left for good, so the others neither paused nor came back."""
    homes, told = [tmp_path, tmp_path / "2", tmp_path / "3"], list[Path]()

    def call_daemon(home: Path, what: str, method: str = "GET") -> Any:
        if method == "GET":
            return {"state": "leaving"}
        told.append(home)
        if home == tmp_path:
            raise UserError("the daemon ends just now", "start it again")
        return {"state": "leaving"}

    monkeypatch.setattr(commands, "homes_here", lambda home: homes)
    monkeypatch.setattr(commands, "call_daemon", call_daemon)
    done = CliRunner().invoke(app, order.split())
    assert told == homes
    assert isinstance(done.exception, UserError), "and it is told what one of them says"

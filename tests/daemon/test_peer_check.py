"""The doctor's advice for an initial peer that is not reached."""

import asyncio
from typing import Any

import pytest

from p2p_dtfm.daemon.peers import peer_check
from p2p_dtfm.net.errors import Unreachable


def test_who_may_call_nobody_outside_does_not_look_for_it_on_the_other_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a company's firewall the user was told to open the other side's."""

    async def dropped(*arguments: object) -> Any:
        raise TimeoutError

    monkeypatch.setattr("asyncio.open_connection", dropped)
    at = "/ip4/192.0.2.7/tcp/31330"
    error = Unreachable("peer", "no answer")
    cause, fix = asyncio.run(peer_check._why_not(f"{at}/p2p/peer", at, "peer", error))
    assert "does not answer on TCP port 31330" in cause
    assert "on 192.0.2.7, open TCP port 31330" in fix
    assert "or your own network lets no such calls out" in fix

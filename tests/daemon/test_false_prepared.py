"""A Prepared that cannot be read costs a member its place, and a stranger nothing."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.daemon.trainer.trainer import Trainer
from tests.daemon.listening_daemon import ME, OTHER, Daemon
from tests.daemon.trainer_parts import QuietOutlet, trainer_tools


@pytest.mark.parametrize("is_member", [True, False], ids=["member", "stranger"])
def test_who_is_turned_away_for_it(tmp_path: Path, is_member: bool) -> None:
    """Strangers make keys for nothing. Enough of them would push all earlier refused peers out of
    memory."""
    nothing: Any = None
    tools = trainer_tools(tmp_path, ME, nothing, nothing)
    blamed: list[str] = []

    async def hear() -> None:
        daemon = Daemon(tmp_path, Trainer(tools, QuietOutlet()), tools)
        dispatch: Any = daemon._dispatch
        dispatch._membership.members = lambda: {OTHER} if is_member else set()
        dispatch._participant.poison = lambda peer_id, cause: blamed.append(peer_id)
        with pytest.raises(PeerFault):
            dispatch._of_a_step(
                OTHER, SignedPrepared(Signed(OTHER, "prepared", b"\xc1", b"1" * 64))
            )
        newcomers = cast(Any, daemon._agreement)._state.others.newcomers
        assert (OTHER in newcomers._refused) == is_member

    asyncio.run(hear())
    assert blamed == ([OTHER] if is_member else [])

"""A full disk costs time and ends no daemon, also where a run begins with given weights."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.state_transfer import initial_states
from p2p_dtfm.daemon.state_transfer.initial_states import InitialStates
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.train.data import BlobStore
from tests.core.builders import run_spec


class Blobs:
    """Blobs on a disk that takes nothing at the first two tries. What comes then is of no use."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.asked = 0
        self.told: list[tuple[str, str]] = []

    async def fetch(self, digest: str, *rest: object) -> Path:
        self.asked += 1
        self.told += self.status.troubles.present()
        if self.asked < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise PeerFault("is no initial.json")


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InitialStates:
    monkeypatch.setattr(initial_states, "RETRY_S", 0.001)
    spec = run_spec()
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"initial": "ab" * 32})})
    status = Status()
    blobs: Any = Blobs(status)
    return InitialStates(spec, BlobStore(tmp_path), blobs, Compute(), status, lambda: ["founder"])


def test_what_training_never_needs_is_brought_once_there_is_room(states: InitialStates) -> None:
    """The daemon ended, though its training needed none of those weights."""
    asyncio.run(states.keep_beside(lambda: True))
    assert states._blobs.asked == 3  # type: ignore[attr-defined]
    assert not states._status.troubles.present()


def test_a_layer_that_has_no_room_is_waited_for_and_told_of(states: InitialStates) -> None:
    with pytest.raises(UserError, match=r"is no initial\.json"):
        asyncio.run(states.state(0))
    assert states._status.state is State.WAITING and "No space left" in states._status.reason
    what, fix = states._blobs.told[0]  # type: ignore[attr-defined]
    assert "No space left" in what and "free space" in fix
    assert not states._status.troubles.present(), "it is over"

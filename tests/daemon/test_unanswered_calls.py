"""A call that is not answered in time is no broken stream, and the dead are noticed as soon."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.liveness.liveness import (
    LAN_LIVENESS,
    SECOND_NS,
    WAN_LIVENESS,
    Liveness,
    LivenessTiming,
)
from p2p_dtfm.daemon.node import network
from p2p_dtfm.daemon.node.network import Network
from p2p_dtfm.daemon.peers.messenger import DEADLINE_S
from p2p_dtfm.net.errors import NO_ANSWER

TICK_NS = SECOND_NS // 10
SLOW, OTHER = "slow", "other"
HEARD_NS = 20 * SECOND_NS
"""When the slow one was last heard."""
UNANSWERED = f"{NO_ANSWER} {DEADLINE_S:g} s"
BROKEN = "stream reset"
REFUSED = "error:dial to 12D3: * [/ip4/192.0.2.7/tcp/1] dial tcp 192.0.2.7:1: connection refused"


class Watching:
    """A member of a swarm of three, in virtual time; the others speak twice a second."""

    def __init__(self, timing: LivenessTiming, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.liveness = Liveness(timing)
        self.liveness.watch([SLOW, OTHER], 0)
        monkeypatch.setattr(network, "now", SimpleNamespace(monotonic_ns=lambda: self.now_ns))

    def fails(self, cause: str) -> None:
        """A call to the slow one."""
        part: Any = SimpleNamespace(liveness=self.liveness, evidence=asyncio.Event())
        Network.on_broken(part, SLOW, cause)

    def noticed_s(self, cause: str, after_s: float, heard_again_s: float | None = None) -> float:
        """After so long a silence of the slow one it is suspected, where a call failed `after_s`;
        infinite if it is not within 12 s, as it should if it speaks on."""
        failed_ns = HEARD_NS + int(after_s * SECOND_NS)
        again_ns = None if heard_again_s is None else HEARD_NS + int(heard_again_s * SECOND_NS)
        for self.now_ns in range(0, HEARD_NS + 12 * SECOND_NS, TICK_NS):
            if self.now_ns % (SECOND_NS // 2) == 0:
                self.liveness.heard(OTHER, self.now_ns)
                if self.now_ns <= HEARD_NS or (again_ns is not None and self.now_ns >= again_ns):
                    self.liveness.heard(SLOW, self.now_ns)
            if self.now_ns == failed_ns:
                self.fails(cause)
            if SLOW in [suspicion.peer_id for suspicion in self.liveness.tick(self.now_ns)]:
                return (self.now_ns - HEARD_NS) / SECOND_NS
        return float("inf")


@pytest.mark.parametrize("timing", [LAN_LIVENESS, WAN_LIVENESS], ids=["lan", "wan"])
class TestOfThree:
    def test_who_only_answers_late_is_not_suspected(
        self, timing: LivenessTiming, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        again_s = timing.calm_silence_ns / SECOND_NS - 0.2
        late = Watching(timing, monkeypatch).noticed_s(UNANSWERED, 0.2, heard_again_s=again_s)
        assert late == float("inf")
        broken = Watching(timing, monkeypatch).noticed_s(BROKEN, 0.2, heard_again_s=again_s)
        assert broken < again_s, "a stream that breaks is another thing"

    def test_it_is_called_at_once(
        self, timing: LivenessTiming, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watching = Watching(timing, monkeypatch)
        watching.liveness.due_heartbeats(SECOND_NS)
        assert watching.liveness.due_heartbeats(SECOND_NS) == ()
        watching.fails(UNANSWERED)
        assert watching.liveness.due_heartbeats(SECOND_NS) == (SLOW,)

    def test_a_machine_that_vanishes_is_noticed_before_a_call_to_it_would_fail(
        self, timing: LivenessTiming, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So nothing is lost by not counting that: calls that begin after it has gone end later."""
        unanswered = Watching(timing, monkeypatch).noticed_s(UNANSWERED, DEADLINE_S)
        counted = Watching(timing, monkeypatch).noticed_s(BROKEN, DEADLINE_S)
        assert unanswered == counted <= DEADLINE_S + 0.1

    def test_a_process_that_is_killed_is_noticed_at_once(
        self, timing: LivenessTiming, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its streams break, and nobody listens: both are said, and no deadline is waited for."""
        assert Watching(timing, monkeypatch).noticed_s(REFUSED, 0.1) < 0.8

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
from p2p_dtfm.core.liveness.lost_tensors import LostTensors
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.node import network
from p2p_dtfm.daemon.node.network import Network
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.peers.messenger import DEADLINE_S
from p2p_dtfm.net.errors import NO_ANSWER, Unreachable

TICK_NS = SECOND_NS // 10
SLOW, OTHER = "slow", "other"
HEARD_NS = 20 * SECOND_NS
"""When the slow member was last heard."""
UNANSWERED = f"{NO_ANSWER} {DEADLINE_S:g} s"
BROKEN = "stream reset"
RELAY = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWJw6Lokk2uzgHtz2k3cu6BTJN2HQVJAioayC8K1TgrZiY"
CIRCUIT = f"{RELAY}/p2p-circuit"
ITS_RELAY_IS_DEAD = (
    "failed to dial: failed to dial 12D3: all dials failed   * [/ip4/192.168.1.2/tcp/2] dial tcp4 "
    f"192.168.1.2:2: connect: connection refused   * [{CIRCUIT}] error opening hop stream to "
    "relay: failed to dial: failed to dial 12D3: all dials failed   * [/ip4/192.0.2.1/tcp/1] dial "
    "tcp4 192.0.2.1:1: connect: connection refused"
)
NO_RELAY_HAS_IT = (
    f"{ITS_RELAY_IS_DEAD}   * [/ip4/192.0.2.9/tcp/1/p2p/12D3/p2p-circuit] error opening relay "
    "circuit: CONNECTION_FAILED (203)"
)
REFUSED = "error:dial to 12D3: * [/ip4/192.0.2.7/tcp/1] dial tcp 192.0.2.7:1: connection refused"


class Watching:
    """A member of a swarm of three, in virtual time. The others speak twice a second."""

    def __init__(self, timing: LivenessTiming, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.way, self.addresses = "", ("/ip4/192.0.2.7/tcp/1",)
        self.liveness = Liveness(timing)
        self.liveness.watch([SLOW, OTHER], 0)
        monkeypatch.setattr(network, "now", SimpleNamespace(monotonic_ns=lambda: self.now_ns))

    def fails(self, cause: str) -> None:
        """A call to the slow member fails."""
        ways = {SLOW: self.way} if self.way else {}
        part: Any = SimpleNamespace(
            liveness=self.liveness,
            evidence=asyncio.Event(),
            far_ends=ways,
            messenger=SimpleNamespace(where=lambda peer_id: self.addresses),
        )
        part.is_relayed = lambda peer_id: Network.is_relayed(part, peer_id)
        Network.on_broken(part, SLOW, cause)

    def noticed_s(self, cause: str, after_s: float, heard_again_s: float | None = None) -> float:
        """After how long a silence the slow member is suspected, where a call failed `after_s`.
        Infinite if it is not suspected within 12 s, as is right if it speaks on."""
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
        """The process's streams break, and nobody listens there. Both are told, and no deadline is
        waited for."""
        assert Watching(timing, monkeypatch).noticed_s(REFUSED, 0.1) < 0.8

    @pytest.mark.parametrize("is_seen", [True, False], ids=["way seen", "way not seen yet"])
    def test_a_relay_that_dies_costs_a_line_and_no_member(
        self, is_seen: bool, timing: LivenessTiming, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watching = Watching(timing, monkeypatch)
        watching.way = CIRCUIT if is_seen else ""
        watching.addresses = (CIRCUIT, "/ip4/192.168.1.2/tcp/2")
        again_s = timing.least_silence_ns / SECOND_NS - 0.5
        assert watching.noticed_s(BROKEN, 0.1, heard_again_s=again_s) == float("inf")
        assert watching.noticed_s(ITS_RELAY_IS_DEAD, 0.1, heard_again_s=again_s) == float("inf")

    def test_whom_no_relay_has_any_more_is_noticed_at_once(
        self, timing: LivenessTiming, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watching = Watching(timing, monkeypatch)
        watching.way = CIRCUIT
        noticed_s = watching.noticed_s(NO_RELAY_HAS_IT, 0.1)
        assert noticed_s < timing.reset_ns / SECOND_NS + 0.3


class Told:
    """A participant's words about frames that were lost."""

    def __init__(self) -> None:
        self.suspected: list[str] = []
        self.repeats = 0
        self.view = ViewId(1, "a" * 64)
        self.lost = LostTensors()

    def _repeat(self, text: str, now_ns: int) -> list[Any]:
        self.repeats += 1
        return []

    def _suspect(self, peer_id: str, cause: str, now_ns: int) -> list[Any]:
        self.suspected.append(peer_id)
        return []

    def _part(self) -> Any:
        view = SimpleNamespace(id=self.view, member_ids=(SLOW, OTHER))
        agreement = SimpleNamespace(
            view=view, repeat_step=self._repeat, suspect=self._suspect, frozen=False
        )
        return SimpleNamespace(
            _agreement=agreement,
            _lost_tensors=self.lost,
            _later=lambda actions: None,
            network=SimpleNamespace(on_broken=lambda peer_id, cause: None),
            trouble=lambda peer_id, cause: Participant.trouble(self._part(), peer_id, cause),
        )

    def loses(self) -> None:
        Participant.trouble(self._part(), SLOW, BROKEN)

    def loses_written(self, *views: ViewId) -> None:
        """Frames of these views were written, and are lost with their line."""
        lost = Unreachable(SLOW, BROKEN)
        Participant._on_undelivered(self._part(), SLOW, "forward", lost, set(views))


def test_all_lanes_that_break_at_once_are_one_trouble_and_no_accusation() -> None:
    """After a relay's death each frame under way over it is reported, and each lane by itself."""
    told = Told()
    for _ in range(4):
        told.loses()
    assert (told.repeats, told.suspected) == (1, [])
    told.view = ViewId(3, "b" * 64)
    told.loses()
    assert told.suspected == [SLOW], "the step that was repeated for it fails of it as well"


def test_what_was_written_in_a_view_that_is_over_costs_the_next_one_nothing() -> None:
    """A line may break long after its last frame. What the next view lacks is sent anew there, so
    its step was repeated for nothing, and the second such line had its peer accused."""
    told, over, present = Told(), ViewId(1, "a" * 64), ViewId(3, "b" * 64)
    told.view = present
    told.loses_written(over)
    assert (told.repeats, told.suspected) == (0, [])
    told.loses_written(over, present)
    assert told.repeats == 1


def test_what_has_committed_since_clears_it() -> None:
    told = Told()
    told.loses()
    told.lost.clear()
    told.view = ViewId(3, "b" * 64)
    told.loses()
    assert (told.repeats, told.suspected) == (2, [])

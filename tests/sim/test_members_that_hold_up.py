"""One member of four answers, and yet keeps an attempt at a view from its end. By the daemons' own
deadlines it is left out before long. In whose favour it does so makes no difference."""

from collections.abc import Callable

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import LAN, SECOND_NS
from p2p_dtfm.core.liveness.liveness import LAN_LIVENESS
from p2p_dtfm.core.messages.agreement_messages import (
    Accusation,
    Active,
    AgreementMessage,
    Contribution,
    Gather,
    Heartbeat,
    Ready,
    Synced,
    sign_contribution,
)
from p2p_dtfm.core.messages.statements import charge, stated
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import sign_for
from p2p_dtfm.sim.faults.simulated_training import SimulatedTraining
from tests.core.builders import WORKLOAD, record
from tests.core.liars import contribution, evil_record
from tests.sim.test_lying_members import replicas

NAMES = ["a", "b", "c", "d"]
LIAR = "b"
HELD_UP_LIMIT_NS = 10 * SECOND_NS
WATCHED_NS = 40 * SECOND_NS
INVENTED = [Member(f"nobody{number:02}", 1) for number in range(30)]
Lie = Callable[[AgreementMessage, str], AgreementMessage | None]
MADE: dict[int, Contribution] = {}
"""The liar's contributions, by number of the attempt."""


def no_ready(said: AgreementMessage, to: str) -> AgreementMessage | None:
    return None if isinstance(said, Ready | Active) else said


def no_ready_to_one(said: AgreementMessage, to: str) -> AgreementMessage | None:
    return no_ready(said, to) if to == "a" else said


def another_view(said: AgreementMessage, to: str) -> AgreementMessage | None:
    if not isinstance(said, Ready):
        return said
    view = ViewId(said.view.number, "f" * 64)
    return stated(msgspec.structs.replace(said, view=view), sign_for(LIAR))


def other_knowledge(said: AgreementMessage, to: str) -> AgreementMessage | None:
    return msgspec.structs.replace(said, digest="f" * 64) if isinstance(said, Gather) else said


def another_face_to_each(said: AgreementMessage, to: str) -> AgreementMessage | None:
    return _with(said, lambda mine: msgspec.structs.replace(mine, step=mine.step + ord(to) - 97))


def other_knowledge_for_ready(said: AgreementMessage, to: str) -> AgreementMessage | None:
    """The liar says that it knows the same, and then that it knows something else."""
    if not isinstance(said, Ready):
        return said
    number = said.view.number
    return Gather(said.sender, number, number % 2 == 0, GENESIS, 1 << 20, (), (), "f" * 64)


def another_face_to_one_late(said: AgreementMessage, to: str) -> AgreementMessage | None:
    """Once the others have gone on, one member hears another contribution of the liar. This member
    is the first to say so."""
    if isinstance(said, Gather) and to == "a":
        for signed in said.contributions:
            if signed.peer_id == LIAR:
                MADE[said.number] = decode(signed.payload, Contribution)
        return msgspec.structs.replace(said, digest="")
    if not isinstance(said, Ready) or to != "a":
        return None if isinstance(said, Ready) else said
    number = said.view.number
    other = msgspec.structs.replace(MADE[number], step=MADE[number].step + 1)
    shown = (sign_contribution(other, sign_for(LIAR)),)
    return Gather(said.sender, number, number % 2 == 0, GENESIS, 1 << 20, shown, (), "")


def accuses_nobody_there(said: AgreementMessage, to: str) -> AgreementMessage | None:
    return _accusing(said, Member("nobody", 1))


def accuses_itself(said: AgreementMessage, to: str) -> AgreementMessage | None:
    return _accusing(said, said.sender) if isinstance(said, Gather) else said


def _accusing(said: AgreementMessage, whom: Member) -> AgreementMessage:
    if not isinstance(said, Gather):
        return said
    run_digest = record("template").run_digest
    item = charge(Accusation(said.sender, whom), run_digest, said.number, sign_for(LIAR))
    return msgspec.structs.replace(said, accusations=(*said.accusations, item))


def brings_what_it_invents(said: AgreementMessage, to: str) -> AgreementMessage | None:
    """The liar brings an invented peer's contribution, so somebody else may have opened the
    attempt."""
    if not isinstance(said, Gather) or not said.contributions:
        return said
    parts = (*said.contributions, contribution(said.number, None, INVENTED[0]))
    return msgspec.structs.replace(said, contributions=parts)


def inventions(said: AgreementMessage, to: str) -> AgreementMessage | None:
    """The liar names newcomers that answer one after the other."""
    named = _with(said, lambda mine: msgspec.structs.replace(mine, joiners=tuple(INVENTED)))
    if not isinstance(named, Gather) or not named.contributions:
        return named
    return msgspec.structs.replace(named, newcomers=tuple(map(evil_record, INVENTED)))


def _with(
    said: AgreementMessage, change: Callable[[Contribution], Contribution]
) -> AgreementMessage:
    """A Gather with a changed contribution of the liar's own."""
    if not isinstance(said, Gather):
        return said
    parts = [
        part
        if part.peer_id != LIAR
        else sign_contribution(change(decode(part.payload, Contribution)), sign_for(LIAR))
        for part in said.contributions
    ]
    return msgspec.structs.replace(said, contributions=tuple(parts))


class HoldingUp(SimulatedPeer):
    """`lie` is what the liar says instead; `stops` is how often it has all agree anew."""

    lie: Lie
    stops = 1
    begins = False
    last_invented_ns = 0

    def receive(self, sender: str, message: AgreementMessage) -> None:  # type: ignore[override]
        is_deaf = type(self).lie in (other_knowledge_for_ready, another_face_to_one_late)
        if self.name == LIAR and self.begins and isinstance(message, Ready | Active) and is_deaf:
            return
        try:
            super().receive(sender, message)
        except Violation as violation:  # the liar should be found faulty
            if LIAR not in (sender, self.name) or "takes" not in str(violation):
                raise

    def send(self, receiver: str, message: AgreementMessage) -> None:  # type: ignore[override]
        told = message
        if self.name == LIAR and self.begins:
            told = type(self).lie(message, receiver)  # type: ignore[assignment]
        if told is not None:
            super().send(receiver, told)

    def _beat(self) -> None:
        super()._beat()
        if self.name != LIAR or not self.begins or self.agreement.view is None:
            return
        if self.stops > 0:
            self.stops -= 1
            self.do(self.agreement.repeat_step("it says so", self.now_ns))
        self._let_one_answer()

    def _let_one_answer(self) -> None:
        attempt, lie = self.agreement._state.attempt, type(self).lie
        late = self.now_ns - self.last_invented_ns >= 3 * SECOND_NS // 2
        if lie is not inventions or attempt is None or not late:
            return
        self.last_invented_ns = self.now_ns
        one = INVENTED[self.now_ns // SECOND_NS % len(INVENTED)]
        part = contribution(attempt.number, None, one)
        news = msgspec.structs.replace(attempt.gather(), contributions=(part,), round=1 << 20)
        for name in NAMES:
            super().send(name, news)


@pytest.mark.parametrize(
    ("lie", "stops"),
    [
        (no_ready, 1),
        (no_ready_to_one, 1),
        (another_view, 1),
        (other_knowledge, 1),
        (another_face_to_each, 1),
        (inventions, 1),
        (other_knowledge_for_ready, 1),
        (another_face_to_one_late, 1),
        (lambda said, to: said, 1_000_000),
        (accuses_nobody_there, 1_000_000),
        (accuses_itself, 1_000_000),
        (brings_what_it_invents, 1_000_000),
    ],
    ids=lambda it: getattr(it, "__name__", str(it)),
)
def test_it_holds_up_the_others_for_seconds_only(lie: Lie, stops: int) -> None:
    world = _world(lie, stops)
    world.run_until(lambda: all(peer.agreement.step >= 4 for peer in world.peers.values()))

    longest_ns, last_ns, end_ns = 0, world.now_ns, world.now_ns + WATCHED_NS

    def committed(name: str, step: int) -> None:
        nonlocal longest_ns, last_ns
        if name != LIAR:
            longest_ns, last_ns = max(longest_ns, world.now_ns - last_ns), world.now_ns

    world.committed = committed  # type: ignore[method-assign]
    world.peers[LIAR].begins = True  # type: ignore[attr-defined]
    world.run_to(end_ns)
    assert max(longest_ns, end_ns - last_ns) < HELD_UP_LIMIT_NS
    honest = [world.peers[name] for name in NAMES if name != LIAR]
    assert sum(peer.view is not None for peer in honest) >= 2, "some are on their way back at most"


def test_who_finds_out_late_that_one_has_said_two_things_stays() -> None:
    """The member shows both words. That it knows something else was held against it, and it was
    out."""
    world = _world(another_face_to_one_late, 1)
    world.run_until(lambda: all(peer.agreement.step >= 4 for peer in world.peers.values()))
    world.peers[LIAR].begins = True  # type: ignore[attr-defined]
    others = [name for name in NAMES if name != LIAR]
    world.run_until(lambda: _are_in(world, others) and LIAR not in _members(world), limit_s=30)
    assert [world.peers[name].agreement.me.life for name in others] == [1, 1, 1]


def _members(world: AgreementWorld) -> tuple[str, ...]:
    view = world.peers["a"].view
    return view.member_ids if view is not None else ()


def a_next_life(said: AgreementMessage, to: str) -> AgreementMessage | None:
    """The liar names another member's next life as a newcomer. That life never answers, and the
    member knows nothing of it."""
    return _with(said, lambda mine: msgspec.structs.replace(mine, joiners=(Member("c", 99),)))


def _world(lie: Lie, stops: int) -> AgreementWorld:
    facts = {"lie": staticmethod(lie), "stops": stops}
    world = AgreementWorld(1, WORKLOAD, record("template"), replicas, timing=LAN)
    world.peer_type = type("HoldsUp", (HoldingUp,), facts)
    world.liars, world.rejoins = frozenset({LIAR}), True
    world.liveness_timing = LAN_LIVENESS
    for name in NAMES:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found("a"))
    for name in NAMES[1:]:
        world.ask_to_join(name, "a")
    return world


def _are_in(world: AgreementWorld, names: list[str]) -> bool:
    views = [world.peers[name].view for name in names]
    return all(view is not None and set(names) <= set(view.member_ids) for view in views)


@pytest.mark.parametrize("believes_it", [True, False])
def test_naming_the_next_life_of_a_member_keeps_nobody_out(believes_it: bool) -> None:
    world = _world((lambda said, to: said) if believes_it else a_next_life, 0)
    world.run_until(lambda: all(peer.agreement.step >= 4 for peer in world.peers.values()))
    world.peers[LIAR].begins = True  # type: ignore[attr-defined]
    if believes_it:
        liar = world.peers[LIAR].agreement
        state = liar._state
        state.named_newcomers = lambda planned: (Member("c", 99),)  # type: ignore[method-assign]
        world.invariants.enters_gather = lambda *_: None  # type: ignore[method-assign]
    world.add_peer("f")
    world.peers["f"].agreement.wants_view()
    world.ask_to_join("f", "a")
    limit_s = 6 if believes_it else 20
    world.run_until(lambda: _are_in(world, ["a", "c", "d", "f"]), limit_s=limit_s)


class FetchesNothing(SimulatedTraining):
    def fetch_missing(self) -> None:
        pass

    def check_synced(self) -> None:
        pass


class FakesProgress(SimulatedPeer):
    """A newcomer that asks for no states, and says that it gets on."""

    training_type = FetchesNothing

    def send(self, receiver: str, message: AgreementMessage) -> None:  # type: ignore[override]
        if isinstance(message, Heartbeat):
            message = msgspec.structs.replace(message, progress=self.now_ns)
        super().send(receiver, message)


def test_a_newcomer_that_only_says_that_it_gets_on_keeps_nobody_out() -> None:
    world = _world(lambda said, to: said, 0)
    world.run_until(lambda: all(peer.agreement.step >= 4 for peer in world.peers.values()))
    world.peer_type = FakesProgress
    world.add_peer("e")
    world.peers["e"].agreement.wants_view()
    world.ask_to_join("e", "a")
    world.run_until(lambda: world.peers["a"].agreement.next_view is not None)
    world.peer_type = SimulatedPeer
    world.add_peer("f")
    world.peers["f"].agreement.wants_view()
    world.ask_to_join("f", "a")
    world.run_until(lambda: _are_in(world, [*NAMES, "f"]), limit_s=15)


def no_synced(said: AgreementMessage, to: str) -> AgreementMessage | None:
    return None if isinstance(said, Synced) else said


def test_who_never_says_that_it_has_its_states_keeps_nobody_out() -> None:
    """The member needs no states, and its place stays as it is."""
    world = _world(no_synced, 0)
    world.run_until(lambda: all(peer.agreement.step >= 4 for peer in world.peers.values()))
    world.peers[LIAR].begins = True  # type: ignore[attr-defined]
    world.add_peer("f")
    world.peers["f"].agreement.wants_view()
    world.ask_to_join("f", "a")
    world.run_until(lambda: _are_in(world, ["a", "c", "d", "f"]), limit_s=45)


@pytest.mark.parametrize(
    "lie",
    [
        no_ready,
        another_view,
        other_knowledge,
        other_knowledge_for_ready,
        another_face_to_each,
    ],
)
def test_a_newcomer_does_not_keep_a_run_from_being_founded(lie: Lie) -> None:
    world = _world(lie, 0)
    world.peers[LIAR].begins = True  # type: ignore[attr-defined]
    world.run_until(lambda: _are_in(world, ["a", "c", "d"]), limit_s=12)

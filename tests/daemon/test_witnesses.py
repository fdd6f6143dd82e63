"""A state counts if the others have it too, and a donor that lies is left."""

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.wire import ConfirmLayers, StateDigest
from p2p_dtfm.daemon.state_transfer import witnesses
from p2p_dtfm.daemon.state_transfer.following import rolled_layers
from p2p_dtfm.daemon.state_transfer.following.follower import Follower
from p2p_dtfm.daemon.state_transfer.following.rolled_layers import witnesses_of
from p2p_dtfm.daemon.state_transfer.witnesses import VERSIONS_TOLD, StateVotes, WitnessDesk
from p2p_dtfm.train.model.layer_state import LayerState
from tests.daemon.trainer_parts import SPEC

VIEW = ViewId(4, "next")
NEXT: Any = SimpleNamespace(id=VIEW)
TRUE, FALSE = b"1" * 16, b"2" * 16


def counts(donor: bytes, *others: bytes, silent: int = 0, version: int = 7) -> bool:
    """Whether a donor's state counts, given what others say of it."""
    votes = StateVotes()
    names = [f"w{number}" for number in range(len(others) + silent)]
    for number, name in enumerate(names):
        votes.ask(name, VIEW, number, {0, 1})
    for number, digest in enumerate(others):
        votes.said(names[number], StateDigest(VIEW, number, 0, version, digest))
    return asyncio.run(votes.count(names, 0, 7, "donor", donor.hex() + "00" * 16))


def test_what_most_say_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witnesses, "LIMIT_S", 0.05)
    assert counts(TRUE, TRUE)
    assert counts(TRUE, TRUE, FALSE), "the odd one is another"
    assert not counts(FALSE, TRUE, TRUE)
    assert not counts(FALSE, TRUE), "one word against another"
    assert counts(TRUE), "where nobody else has it, the donor's word has to do"
    assert counts(TRUE, silent=2), "nobody waits for ever"
    assert counts(TRUE, FALSE, version=6), "of another version it says nothing"


def test_only_who_was_asked_is_heard() -> None:
    votes = StateVotes()
    votes.ask("w", VIEW, 3, {0})
    votes.said("stranger", StateDigest(VIEW, 3, 0, 7, FALSE))
    votes.said("w", StateDigest(VIEW, 2, 0, 7, FALSE))
    votes.said("w", StateDigest(ViewId(9, "other"), 3, 0, 7, FALSE))
    assert not votes._said
    for wrong in (StateDigest(VIEW, 3, 1, 7, FALSE), StateDigest(VIEW, 3, 0, 7, b"short")):
        with pytest.raises(PeerFault, match="not asked for"):
            votes.said("w", wrong)
    for version in range(100):
        votes.said("w", StateDigest(VIEW, 3, 0, version, TRUE))
    assert len(votes._said[0]) == witnesses.SAID_LIMIT


@pytest.mark.parametrize("donor", [TRUE, FALSE], ids=["honest donor", "its colluder"])
def test_nobody_talks_so_much_that_the_others_are_forgotten(donor: bytes) -> None:
    """A peer told digests of sixteen more versions, and was the only one left with a word. With a
    colluder it had any state taken for the right one; alone it had all honest donors refused."""
    votes, names = StateVotes(), ("one", "two", "three", "liar")
    for number, name in enumerate(names):
        votes.ask(name, VIEW, number, {0})
    for number in range(3):
        votes.said(names[number], StateDigest(VIEW, number, 0, 7, TRUE))
    for version in range(100, 7, -1):
        votes.said("liar", StateDigest(VIEW, 3, 0, version, FALSE))
    votes.said("liar", StateDigest(VIEW, 3, 0, 7, FALSE))
    blob = donor.hex() + "00" * 16
    assert votes.is_outvoted(names, 0, 7, "donor", blob) == (donor is FALSE)
    assert asyncio.run(votes.count(names, 0, 7, "donor", blob)) == (donor is TRUE)


@pytest.mark.parametrize("count", range(3, 9))
def test_colluders_that_are_few_do_not_have_a_right_state_fetched_anew(count: int) -> None:
    """Of eight members two were half of the four that were asked. A donor that gave the gradients
    has no say where three others have one."""
    holders = [f"h{number}" for number in range(count)]
    colluders = holders[: (count - 1) // 3]
    votes, asked = StateVotes(), witnesses_of(holders, "h7")
    assert len(asked) % 2 == 1 and ("h7" not in asked)
    for number, name in enumerate(asked):
        votes.ask(name, VIEW, number, {0})
        digest = FALSE if name in colluders else TRUE
        votes.said(name, StateDigest(VIEW, number, 0, 7, digest))
    assert not asyncio.run(votes.is_odd(asked, 0, 7, TRUE))
    assert asyncio.run(votes.is_odd(asked, 0, 7, FALSE))


def test_colluders_that_are_first_in_a_plan_are_not_most_of_whom_all_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of sixteen replicas four collude, and are in the first pipelines. Each newcomer asked the
    first four of a plan: with a donor of theirs the colluders were most of the five voices, each
    time. Its state was then taken to be right, and asked for again of the same."""
    holders = [f"h{number}" for number in range(16)]
    colluders, donor = set(holders[:4]), "h0"
    believed, twice = 0, 0
    monkeypatch.setattr(rolled_layers, "donors_of", lambda view, layer, me: holders)
    for number in range(200):
        me = f"newcomer {number}"
        tools = SimpleNamespace(me=me)
        follower: Any = SimpleNamespace(_donors=lambda layer: holders, _tools=tools, view=NEXT)
        asked = Follower._witnesses(follower, donor, 0)
        assert len(set(asked)) == witnesses.WITNESSES_LIMIT and donor not in asked
        is_believed = len(colluders & set(asked)) >= 2
        again = rolled_layers._asked_of(NEXT, 0, me, donor)
        believed += is_believed
        twice += is_believed and 2 * len(colluders & set(again)) > len(again)
    assert believed < 50 and twice < 5, "by chance alone: 15% and 0.3%"


def test_where_two_others_have_a_layer_both_are_asked() -> None:
    assert witnesses_of(["a", "b"], "a") == ["a", "b"]
    assert witnesses_of(["a", "b", "c"], "a") == ["a", "b", "c"]
    assert witnesses_of(["a", "b", "c", "d"], "a") == ["b", "c", "d"]


class Line:
    def __init__(self) -> None:
        self.told: list[StateDigest] = []

    def tell(self, peer_id: str, message: Any) -> None:
        self.told.append(message)


def test_a_holder_tells_what_it_has_in_the_next_steps() -> None:
    line, compute = Line(), Compute()
    messenger: Any = line
    places: Any = SimpleNamespace(needs=lambda *asked: True)
    desk = WitnessDesk(messenger, compute, places)
    state = LayerState.genesis(SPEC, 0)

    async def run() -> None:
        desk.asked("newcomer", ConfirmLayers(VIEW, 5, (0, 3)))
        for step in range(VERSIONS_TOLD + 2):
            state.version = step
            assert desk.is_due(step) == (step < VERSIONS_TOLD)
            await desk.tell({0: state}, step)
            await desk.tell({0: state}, step)  # a step boundary may last

    asyncio.run(run())
    compute.close()
    assert [message.version for message in line.told] == list(range(VERSIONS_TOLD))
    state.version = 0
    blob = hashlib.blake2b(state.to_bytes(), digest_size=32).digest()
    assert line.told[0].digest == blob[:16], "as the name of the blob that a donor offers begins"


def test_a_layer_that_still_comes_to_a_holder_is_told_once_it_is_there() -> None:
    """The layer's guardian was first in the new view. It heard nothing for five seconds, and
    fetched all anew."""
    line, compute = Line(), Compute()
    messenger: Any = line
    places: Any = SimpleNamespace(needs=lambda *asked: True)
    desk = WitnessDesk(messenger, compute, places)
    state = LayerState.genesis(SPEC, 0)
    state.version = 6

    async def run() -> None:
        desk.asked("guardian", ConfirmLayers(VIEW, 5, (0,)))
        await desk.tell({}, 7)
        await desk.tell({0: state}, 7)
        assert not line.told and desk.is_due(7)
        state.version = 7
        await desk.tell({0: state}, 7)
        for version in range(8, 7 + VERSIONS_TOLD + 1):
            await desk.tell({}, version)

    asyncio.run(run())
    compute.close()
    assert [(said.layer, said.version) for said in line.told] == [(0, 7)]
    assert not desk._requests, "nobody waits for ever for what does not come here"


def test_a_request_that_was_overtaken_takes_no_place_of_a_later_one() -> None:
    """Nor does a request for the next view take the place of one for the present view. One of the
    two was not answered, and after five seconds a donor's states counted by its own word."""
    line, compute = Line(), Compute()
    messenger: Any = line
    places: Any = SimpleNamespace(needs=lambda *asked: True)
    desk = WitnessDesk(messenger, compute, places)
    present = ViewId(3, "present")
    state = LayerState.genesis(SPEC, 0)

    async def run() -> None:
        desk.asked("guardian", ConfirmLayers(present, 5, (0,)))
        desk.asked("guardian", ConfirmLayers(VIEW, 7, (0,)))
        desk.asked("guardian", ConfirmLayers(VIEW, 6, (0,)))
        await desk.tell({0: state}, 0)

    asyncio.run(run())
    compute.close()
    assert [(said.view, said.number) for said in line.told] == [(present, 5), (VIEW, 7)]


def test_who_asks_for_many_views_has_no_more_than_two_answered() -> None:
    places: Any = SimpleNamespace(needs=lambda *asked: None, may_come=lambda view: True)
    desk = WitnessDesk(Line(), Compute(), places)  # type: ignore[arg-type]
    desk.asked("honest", ConfirmLayers(VIEW, 1, (0,)))
    for number in range(2, 200):
        desk.asked("flood", ConfirmLayers(ViewId(number, "?"), number, (0,)))
    assert [sender for sender, _ in desk._requests] == ["honest", "flood", "flood"]

"""A newcomer asks to be let in, whoever is there: nobody, members that vanish, or only dead
ones."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.membership.familiar_peers import FamiliarPeers
from p2p_dtfm.core.messages.agreement_messages import JoinRequest, Standing
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.daemon.node.coming_and_going import entry
from p2p_dtfm.daemon.node.coming_and_going.entry import Entry
from p2p_dtfm.daemon.peers.discovery import first_found
from p2p_dtfm.daemon.peers.member_search import Found, MemberSearch, Sought
from p2p_dtfm.daemon.peers.run_source import OtherProtocol, RunComplete
from p2p_dtfm.daemon.peers.wire import Barred, KnownPeers, PeerAddress
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.ports import now

SENDER = Member("somebody", 1)
VIEW = ViewId(3, "ab" * 32)
STANDING = Standing(SENDER, Certificate(VIEW, "", (SENDER,), ()), True, 9, "")


WISH: Any = "please"


class FakeAgreement:
    """Has a view once living members were asked `asked_for_view` times."""

    def __init__(self) -> None:
        self.view: object = None
        self.next_view = None
        self.attempting = False
        self.known_peers: tuple[str, ...] = ()
        self.familiar = FamiliarPeers("me")
        self.founded = False
        self.others_have_a_view = False
        self.missing_fellows = ()

    def wants_view(self) -> JoinRequest:
        assert self.view is None, "only a newcomer does"
        return WISH

    def found(self, now_ns: int) -> list[Any]:
        self.founded = True
        self.view = None if self.others_have_a_view else "alone"
        return []


class FakeMessenger:
    def __init__(self, agreement: FakeAgreement) -> None:
        self.agreement = agreement
        self.known: tuple[str, ...] = ()
        self.heard_s: dict[str, float] = {}
        self.living: set[str] = set()
        self.asked: list[str] = []
        self.refuses: set[str] = set()
        self.newcomers: set[str] = set()
        """Peers that live, and ask to be let in themselves."""
        self.complete: set[str] = set()
        """Peers that say that the run is complete."""
        self.trains: set[str] = set()
        """Peers that let others in at some time."""
        self.barred: dict[str, Barred] = {}
        """Peers that say that this newcomer is barred."""
        self.passed_over: dict[str, UserError] = {}

    async def ask(self, peer_id: str, message: object) -> bytes:
        self.asked.append(peer_id)
        if peer_id in self.refuses:
            raise Refused("busy", peer_id)
        if peer_id in self.newcomers:
            return encode(KnownPeers((), lets_in=False))
        if peer_id in self.complete:
            return encode(KnownPeers((), standing=STANDING))
        if peer_id in self.trains:
            return encode(KnownPeers(()))
        if peer_id in self.barred:
            return encode(KnownPeers((), barred=self.barred[peer_id]))
        if peer_id not in self.living:
            raise Unreachable(peer_id, "no answer")
        self.agreement.view = "together"
        return encode(KnownPeers((PeerAddress("newly-named", ("/ip4/192.0.2.7/tcp/1",)),)))

    def learn_named(self, peers: Iterable[PeerAddress]) -> None:
        for peer in peers:
            self.learn(peer.peer_id, peer.addresses)

    def learn(self, peer_id: str, addresses: Iterable[str]) -> None:
        self.known = (*self.known, peer_id)


class FakeAcquaintances:
    def __init__(self, looks: Iterable[Found | None]) -> None:
        self.welcomed_by = ""
        self.comes_back = False
        self.looked = 0
        self.said: list[str] = []
        self.turned: UserError | None = None
        """The refusal of a peer that is known."""
        self._looks = iter(looks)

    async def call_again(self) -> None:
        pass

    async def look_for_members(self, run_digest: str) -> Found | None:
        self.looked += 1
        return next(self._looks, None)

    def turned_away(self) -> UserError | None:
        return self.turned

    def say_nobody_answers(self, run_digest: str, pause_s: float) -> None:
        self.said.append(run_digest)

    async def look_for_the_lost(self, agreement: object) -> None:
        pass


class Newcomer(Entry):
    """A newcomer with the parts that the loop touches, and nothing else."""

    def __init__(self, looks: Iterable[Found | None] = (), run: str = "") -> None:
        self.agreement = FakeAgreement()
        self.messenger = FakeMessenger(self.agreement)
        self.acquaintances = FakeAcquaintances(looks)
        self.settings = SimpleNamespace(
            run=run, initial_peers=(), expect_peers=1, expect_wait_s=1.0
        )
        self.status = Status()
        self.life = SimpleNamespace(
            spawn=asyncio.ensure_future, left=asyncio.Event(), leaving=asyncio.Event()
        )
        self.resumed = False
        self.membership = SimpleNamespace(
            agreement=self.agreement,
            acquaintances=self.acquaintances,
            me=SimpleNamespace(peer_id="me"),
            run=SimpleNamespace(digest="ab" * 32, spec=SimpleNamespace(total_steps=40)),
            goes_on_from_own=True,
            has_lost_memory=False,
            joiners=lambda: (),
            founds=False,
            may_go_on_alone=bool(run),
            asked_first="",
            actions=SimpleNamespace(do=lambda actions: None),
        )
        self.participant = SimpleNamespace(
            membership=self.membership,
            local=SimpleNamespace(
                settings=self.settings,
                status=self.status,
                life=self.life,
            ),
            network=SimpleNamespace(
                messenger=self.messenger, keeper=SimpleNamespace(may_hear=lambda peer_id: True)
            ),
            views=[],
            trainer=SimpleNamespace(states={}),
            resume_from_checkpoint=self._resume,
        )
        super().__init__(self.participant)  # type: ignore[arg-type]

    async def _resume(self) -> None:
        self.resumed = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "JOIN_RETRY_S", 0.001)
    monkeypatch.setattr(entry, "TICK_S", 0.001)
    monkeypatch.setattr(entry, "LOOK_AGAIN_S", 0.004)
    monkeypatch.setattr(entry, "LOOK_AGAIN_LIMIT_S", 0.02)
    monkeypatch.setattr(entry, "FOUNDS_AFTER_S", 0.016)
    monkeypatch.setattr(entry, "GOES_ALONE_AFTER_S", 0.2)


def play(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 5.0)

    asyncio.run(bounded())


def member(name: str) -> Found:
    welcome = SimpleNamespace(peers=[PeerAddress(name, ("/ip4/192.0.2.7/tcp/1",))])
    return Found(name, welcome, "met before")  # type: ignore[arg-type]


def test_who_knows_nobody_looks_until_somebody_is_found() -> None:
    newcomer = Newcomer([None, None, member("alive")])
    newcomer.messenger.living = {"alive"}
    newcomer.settings.initial_peers = ("given",)  # one that waits, and does not found
    play(newcomer.join)
    assert newcomer.agreement.view == "together" and newcomer.acquaintances.looked == 3
    assert newcomer.messenger.asked == ["alive"]


def test_members_that_vanish_are_passed_over() -> None:
    newcomer = Newcomer()
    messenger = newcomer.messenger
    newcomer.acquaintances.welcomed_by = "first"
    messenger.known = ("dead-1", "dead-2", "last")
    messenger.heard_s = {"first": 3.0, "dead-1": 2.0, "dead-2": 1.0}
    messenger.living = {"last"}
    play(newcomer.join)
    assert newcomer.agreement.view == "together" and newcomer.acquaintances.looked == 0
    assert messenger.asked[-1] == "last" and len(messenger.asked) <= 4


@pytest.mark.parametrize("promises", [False, True])
def test_who_comes_back_asks_those_that_it_has_met_and_lost_last(promises: bool) -> None:
    """Each lost member took ten seconds not to answer, and was asked before the present members
    again."""
    newcomer = Newcomer()
    messenger, now_s = newcomer.messenger, now.monotonic_s()
    messenger.known, messenger.trains = ("gone-1", "gone-2", "member", "unmet"), {"member", "unmet"}
    messenger.heard_s = {"gone-1": now_s - 3600, "gone-2": now_s - 90, "member": now_s - 1}

    async def asks() -> None:
        joining = asyncio.create_task(newcomer.join())
        while messenger.asked.count("member") < 4:
            await asyncio.sleep(0.001)
        assert {*messenger.asked} == {"member", "unmet"}
        if not promises:  # nobody else answers any more
            messenger.trains.clear()
        while not {"gone-1", "gone-2"} <= {*messenger.asked}:
            await asyncio.sleep(0.001)
        newcomer.agreement.view = "together"
        await joining

    play(asks)


def test_a_member_that_is_only_busy_is_asked_again() -> None:
    newcomer = Newcomer()
    messenger = newcomer.messenger
    messenger.known, messenger.refuses, messenger.living = ("busy",), {"busy"}, {"busy"}

    async def calms_down() -> None:
        loop = asyncio.create_task(newcomer.join())
        while len(messenger.asked) < 3:
            await asyncio.sleep(0.001)
        messenger.refuses.clear()
        await loop

    play(calms_down)
    assert set(messenger.asked) == {"busy"} and newcomer.acquaintances.looked == 0


def test_who_is_barred_is_told_why_and_until_when_and_asks_the_others_as_well() -> None:
    newcomer = Newcomer()
    messenger, status = newcomer.messenger, newcomer.status
    messenger.known, messenger.heard_s = ("strict", "other"), {"strict": 2.0, "other": 1.0}
    messenger.barred = {"strict": Barred(412, 12, "works otherwise " + "x" * 5000)}
    messenger.barred["other"] = messenger.barred["strict"]

    async def is_told() -> None:
        loop = asyncio.create_task(newcomer.join())
        while len(messenger.asked) < 4:
            await asyncio.sleep(0.001)
        assert "barred until step 412, 400 steps from now" in status.reason
        assert "works otherwise" in status.reason and len(status.reason) < 400
        ((what, fix),) = status.troubles.present()
        assert what == status.reason and "memory" in fix
        messenger.barred, messenger.living = {}, {"strict"}
        await loop

    play(is_told)
    assert set(messenger.asked) == {"strict", "other"}
    assert newcomer.agreement.view == "together" and not status.troubles.present()


def test_when_all_known_members_are_dead_it_says_so_and_waits_ever_longer() -> None:
    newcomer = Newcomer()
    newcomer.settings.initial_peers = ("given",)
    newcomer.messenger.known = ("dead-1", "dead-2")

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer.join())
        while newcomer.acquaintances.looked < 6:
            await asyncio.sleep(0.001)
        assert not loop.done()
        assert newcomer.acquaintances.said
        newcomer.agreement.view = "let in by somebody who called"
        await loop

    play(for_a_while)
    assert not newcomer.agreement.founded, "who was told of peers never founds"


def test_who_came_back_to_members_that_then_died_goes_on_alone() -> None:
    newcomer = Newcomer(run="tiny")
    newcomer.acquaintances.welcomed_by = "died-since"
    play(newcomer.join)
    assert newcomer.resumed and newcomer.agreement.founded and newcomer.membership.founds


async def waits_until_it_is_let_in(newcomer: Newcomer) -> None:
    """The newcomer looks again and again, says why, and founds nothing."""
    while newcomer.acquaintances.looked < 6:
        await asyncio.sleep(0.001)
    assert newcomer.acquaintances.said and not newcomer.agreement.founded
    newcomer.agreement.view = "let in"


def test_whose_members_are_of_another_version_by_now_waits_for_them() -> None:
    """The newcomer went on alone beside the members: as far as it saw, nobody answered."""
    newcomer = Newcomer(run="tiny")
    newcomer.acquaintances.welcomed_by = "updated-since"
    newcomer.acquaintances.turned = OtherProtocol("updated-since", 99)

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer.join())
        await waits_until_it_is_let_in(newcomer)
        await loop

    play(for_a_while)


def test_who_waits_before_it_founds_and_hears_of_another_version_founds_nothing() -> None:
    """The newcomer came back to nobody, and a member that it had met began meanwhile."""
    newcomer = Newcomer(run="tiny")

    async def begins() -> None:
        newcomer.settings.expect_peers, newcomer.settings.expect_wait_s = 2, 60.0
        founding = asyncio.create_task(newcomer.found())
        await asyncio.sleep(0.01)
        newcomer.acquaintances.turned = OtherProtocol("began", 99)
        await waits_until_it_is_let_in(newcomer)
        await founding

    play(begins)


def test_two_newcomers_do_not_wait_for_each_other() -> None:
    """Both came back as the last member died. Each found the other, and asked it for ever."""
    newcomer = Newcomer(run="tiny")
    newcomer.acquaintances.welcomed_by = "came-back-too"
    newcomer.messenger.newcomers = {"came-back-too"}
    play(newcomer.join)
    assert newcomer.resumed and newcomer.agreement.founded


def test_who_may_not_go_on_alone_waits_with_another_newcomer() -> None:
    newcomer = Newcomer()
    newcomer.acquaintances.welcomed_by = "came-back-too"
    newcomer.messenger.newcomers = {"came-back-too"}

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer.join())
        while newcomer.acquaintances.looked < 6:
            await asyncio.sleep(0.001)
        newcomer.messenger.newcomers = set()
        newcomer.messenger.living = {"came-back-too"}  # it is let in, or goes on alone
        await loop

    play(for_a_while)
    assert newcomer.agreement.view == "together" and not newcomer.agreement.founded


def test_who_has_been_in_a_view_never_founds_another() -> None:
    newcomer = Newcomer(run="tiny")
    newcomer.participant.views = [{"view": 3}]

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer.join())
        while newcomer.acquaintances.looked < 6:
            await asyncio.sleep(0.001)
        newcomer.agreement.view = "let in"
        await loop

    play(for_a_while)
    assert not newcomer.agreement.founded


def test_who_waits_for_an_agreed_view_says_so_again_and_again() -> None:
    """The members may have given the view up while this peer was silent for a moment."""
    newcomer = Newcomer()
    messenger = newcomer.messenger
    newcomer.agreement.next_view = SimpleNamespace(member_ids=("first", "me", "second"))
    messenger.known = ("elsewhere",)
    messenger.refuses = {"first", "second"}

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer.join())
        while len(messenger.asked) < 4:
            await asyncio.sleep(0.001)
        newcomer.agreement.view = "let in"
        await loop

    play(for_a_while)
    assert set(messenger.asked) == {"first", "second"} and newcomer.acquaintances.looked == 0


# ---- looking in all places at once


def test_the_first_place_that_has_somebody_ends_the_others() -> None:
    ended = []

    async def slow() -> Found | None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")
        return None

    async def nobody() -> Found | None:
        return None

    async def somebody() -> Found | None:
        await asyncio.sleep(0.01)
        return member("alive")

    async def scenario() -> None:
        found = await first_found([slow(), nobody(), somebody()], 5.0)
        assert found is not None and found.peer_id == "alive" and ended == ["slow"]
        assert await first_found([slow(), nobody()], 0.02) is None
        assert await first_found([], 0.02) is None

    play(scenario)


def test_it_says_where_it_asks() -> None:
    async def own() -> tuple[str, ...]:
        return ()

    search = MemberSearch(None, None, None, own)  # type: ignore[arg-type]
    assert search.places(Sought("ab", ())) == "the directory"
    met = (("a", ()), ("b", ()))
    assert search.places(Sought("ab", met)) == "2 peers met before and the directory"


def test_who_cannot_say_where_it_is_looks_for_members_all_the_same() -> None:
    """The newcomer's p2pd had no time to answer for five seconds, on a busy machine. The daemon
    ended, and said that a peer that it works with is gone, which was itself."""

    class Search(MemberSearch):
        async def _ask(self, sought: Sought, peer_id: str, *of: Any) -> Found | None:
            return member(peer_id)

        async def _ask_directory(self, sought: Sought, own: tuple[str, ...]) -> Found | None:
            return None

    async def own() -> tuple[str, ...]:
        raise Unreachable("me", "no connection within 5 s")

    async def scenario() -> None:
        search = Search(None, None, None, own)  # type: ignore[arg-type]
        found = await search.look(Sought("ab", (("alive", ()),)))
        assert found is not None and found.peer_id == "alive"

    play(scenario)


def test_who_cannot_go_on_alone_at_once_does_not_begin_it_twice() -> None:
    newcomer, resumed = Newcomer(run="tiny"), []

    async def resume() -> None:
        resumed.append(True)

    newcomer.participant.resume_from_checkpoint = resume
    newcomer.agreement.found = lambda now_ns: []  # type: ignore[method-assign]

    async def twice() -> None:
        for _ in range(2):
            await newcomer._go_on_alone()

    play(twice)
    assert resumed == [True]


def test_who_says_that_the_run_is_complete_and_does_not_show_it_is_not_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That peer became a member with the last commit, and has nothing that shows the end; others
    have."""
    newcomer = Newcomer()
    newcomer.messenger.known = ("shows-it", "only-says-it")
    newcomer.messenger.complete = {"shows-it", "only-says-it"}
    newcomer.agreement.familiar.meet(newcomer.messenger.known)
    monkeypatch.setattr(entry, "shows_end", lambda peer, *_: peer == "shows-it")
    with pytest.raises(RunComplete):
        play(newcomer.join)
    assert newcomer.messenger.asked.count("only-says-it") == 1


@pytest.mark.parametrize("others", [{"first", "second"}, {"first"}, set()], ids=len)
def test_one_member_alone_has_nobody_end_who_is_agreed_on(
    others: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Prepared of one member for the last step showed it, as nobody knows who has a stage there.
    A member that started again was told so by a member that had just let it in, and ended."""
    newcomer = Newcomer()
    messenger = newcomer.messenger
    newcomer.agreement.next_view = SimpleNamespace(member_ids=("first", "liar", "me", "second"))
    messenger.complete, messenger.trains = {"liar"}, others
    messenger.refuses = {"first", "second"} - others
    newcomer.agreement.familiar.meet(("first", "liar", "second"))
    monkeypatch.setattr(entry, "shows_end", lambda *_: True)

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer.join())
        while messenger.asked.count("liar") < 3:
            await asyncio.sleep(0.001)
        newcomer.agreement.view = "let in"
        await loop

    play(for_a_while)


def test_an_agreed_view_is_waited_for_no_more_once_most_of_its_members_show_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newcomer = Newcomer()
    newcomer.agreement.next_view = SimpleNamespace(member_ids=("first", "gone", "me", "second"))
    newcomer.messenger.complete = {"first", "second"}
    newcomer.agreement.familiar.meet(("first", "gone", "second"))
    monkeypatch.setattr(entry, "shows_end", lambda *_: True)
    with pytest.raises(RunComplete):
        play(newcomer.join)


def test_a_view_that_is_given_up_while_its_members_are_reminded_is_waited_for_no_more() -> None:
    """Meanwhile another peer has shown that the run is complete."""
    newcomer = Newcomer()
    newcomer.agreement.next_view = SimpleNamespace(member_ids=("first", "me", "second"))
    newcomer._complete = RunComplete("ab" * 8, 40)

    async def reminds(view: object, turn: int) -> None:
        newcomer.agreement.next_view, newcomer.agreement.view = None, "let in elsewhere"

    newcomer._say_that_it_waits = reminds  # type: ignore[method-assign]
    play(newcomer.join)
    assert newcomer.agreement.view == "let in elsewhere"


def test_a_dead_member_that_is_reminded_holds_up_nobody_whose_view_is_given_up() -> None:
    """The dead member takes ten seconds not to answer. For so long the user was told that layers
    are fetched, and no other peer was asked."""
    newcomer = Newcomer()
    messenger = newcomer.messenger
    newcomer.agreement.next_view = SimpleNamespace(member_ids=("dead", "me"))
    newcomer.status.say(State.SYNCING, "5 of 6 layers to fetch")
    messenger.known, messenger.living = ("dead", "member"), {"member"}
    messenger.heard_s = {"member": now.monotonic_s()}
    answer, waits = messenger.ask, asyncio.Event()

    async def ask(peer_id: str, message: object) -> bytes:
        if peer_id == "dead":
            newcomer.agreement.next_view = None
            await waits.wait()
        return await answer(peer_id, message)

    messenger.ask = ask  # type: ignore[method-assign]
    play(newcomer.join)
    assert newcomer.agreement.view == "together" and messenger.asked == ["member"]
    assert newcomer.status.state is State.JOINING


def test_who_is_let_in_as_it_reminds_asks_no_more_than_what_it_was_about_to() -> None:
    """The newcomer asked a turn later, when it was no newcomer any more: its daemon ended (seed
    502881)."""
    newcomer = Newcomer()
    agreed = newcomer.agreement.next_view = SimpleNamespace(member_ids=("first", "me"))
    newcomer.messenger.trains = {"first"}

    def is_let_in() -> None:
        newcomer.agreement.next_view, newcomer.agreement.view = None, "together"

    async def remind() -> None:
        asyncio.get_running_loop().call_soon(is_let_in)
        await newcomer._say_that_it_waits(agreed, entry.REMIND_EVERY)  # type: ignore[arg-type]

    play(remind)
    assert newcomer.agreement.view == "together" and len(newcomer.messenger.asked) <= 1


def test_other_newcomers_show_nothing_and_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newcomer was agreed on with one member, as the last step commits, and with two other
    newcomers. Most of these three would never show the end, so it waited for as long as states may
    take."""
    newcomer = Newcomer()
    agreed = SimpleNamespace(member_ids=("first", "me", "new", "newer"))
    newcomer.agreement.next_view = agreed
    newcomer.messenger.complete = {"first"}
    newcomer.messenger.newcomers = {"new", "newer"}
    newcomer.agreement.familiar.meet(("first", "new", "newer"))
    monkeypatch.setattr(entry, "shows_end", lambda *_: True)

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer.join())
        while newcomer.messenger.asked.count("first") < 3 and not loop.done():
            await asyncio.sleep(0.001)
        newcomer.agreement.view = "it waited too long"
        await loop

    with pytest.raises(RunComplete):
        play(for_a_while)


def test_who_lets_others_in_speaks_against_who_says_that_the_run_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newcomer = Newcomer()
    newcomer.agreement.familiar.meet(("liar", "member"))
    newcomer.messenger.complete, newcomer.messenger.trains = {"liar"}, {"member"}
    monkeypatch.setattr(entry, "shows_end", lambda *_: True)

    async def scene() -> None:
        assert not await newcomer._ask_to_be_let_in("liar", WISH) and newcomer._complete is not None
        assert await newcomer._ask_to_be_let_in("member", WISH) and newcomer._complete is None

    play(scene)


def test_who_has_trained_a_run_and_missed_its_last_step_ends_without_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    peer = Newcomer()
    peer.participant.views = [{"view": 8}]
    peer.messenger.known, peer.messenger.complete = ("member",), {"member"}
    peer.agreement.familiar.meet(peer.messenger.known)
    monkeypatch.setattr(entry, "shows_end", lambda *_: True)
    play(peer.join)
    assert peer.life.left.is_set() and peer.status.state is State.DONE
    assert "all 40 steps are done, the last of them without this peer" in caplog.text


def test_a_founder_that_was_left_behind_founds_again_where_nobody_is_in_a_view_any_more() -> None:
    """The others went on without the founder, and have all started again since. They ask it to let
    them in, and it asked them, for ever."""
    founder = Newcomer(run="given")
    founder.participant.views = [{"view": 1}]
    founder.participant.trainer = SimpleNamespace(states={0: "of step 9"})
    founder.messenger.known, founder.messenger.newcomers = ("started-again",), {"started-again"}
    began_s = time.monotonic()
    play(founder.join)
    assert founder.agreement.founded and founder.agreement.view == "alone"
    assert time.monotonic() - began_s >= 0.2, "they may only be cut off"
    assert not founder.resumed, "its states are newer than its disk"
    assert founder.acquaintances.looked > 3


def test_who_is_refused_again_and_again_looks_for_others_and_goes_on_alone() -> None:
    """The refusing peer looks for members itself, and waits for this peer: both did so for ever."""
    founder = Newcomer(run="given")
    founder.messenger.known, founder.messenger.refuses = ("looks-too",), {"looks-too"}
    play(founder.join)
    assert founder.agreement.view == "alone" and founder.resumed
    assert founder.acquaintances.looked >= 2


def test_who_founds_a_run_of_which_there_is_a_view_asks_to_be_let_in() -> None:
    """The peers with which it would have founded are members of that view by now."""
    newcomer = Newcomer()
    newcomer.membership.founds = True
    newcomer.agreement.others_have_a_view = True
    newcomer.messenger.known, newcomer.messenger.living = ("member",), {"member"}
    play(newcomer.found)
    assert newcomer.agreement.founded and newcomer.agreement.view == "together"
    assert not newcomer.membership.founds


class ComesToNothingAtFirst(FakeAgreement):
    """The peers with which it founds start again meanwhile."""

    has_heard_of_view = False
    tries = 0

    def found(self, now_ns: int) -> list[Any]:
        self.tries += 1
        self.view = "together" if self.tries > 1 else None
        return []


def test_who_founds_with_newcomers_that_start_again_founds_anew() -> None:
    """The founder took the newcomers for members of another view. It looked for that view for half
    a minute, and found nothing."""
    newcomer = Newcomer([None] * 9, run="given")
    newcomer.agreement = newcomer.membership.agreement = ComesToNothingAtFirst()
    newcomer.membership.joiners = lambda: ("somebody",)
    newcomer.settings.expect_peers = 1
    play(newcomer.found)
    assert newcomer.agreement.tries == 2 and newcomer.agreement.view == "together"
    assert newcomer.acquaintances.looked == 0, "nothing says that there is a view"


@pytest.mark.parametrize("agreed", ["view", "next_view", "attempting"])
def test_who_is_let_in_while_it_looks_does_not_say_that_nobody_answers(agreed: str) -> None:
    """The peer trained, and told its user for a minute that no member of the run answers."""
    newcomer = Newcomer(run="given")  # that may go on alone, after long enough

    async def look_in_vain(run_digest: str) -> None:
        setattr(newcomer.agreement, agreed, "together")

    newcomer.acquaintances.look_for_members = look_in_vain  # type: ignore[method-assign,assignment]

    async def look() -> None:
        assert not await newcomer._find_others(0.002)

    play(look)
    assert not newcomer.acquaintances.said and not newcomer.agreement.founded


def test_who_is_let_in_while_it_looks_neither_goes_on_alone_nor_away() -> None:
    """The peer was in a view, and was told to leave. The others want its layers first."""
    newcomer = Newcomer(run="given")
    newcomer.participant.views = [{"view": 1}]
    newcomer._alone_since_s = now.monotonic_s() - 1.0

    async def look_in_vain(run_digest: str) -> None:
        newcomer.agreement.view = "together"
        newcomer.life.leaving.set()

    newcomer.acquaintances.look_for_members = look_in_vain  # type: ignore[method-assign,assignment]

    async def look() -> None:
        assert not await newcomer._find_others(0.002)

    play(look)
    assert not newcomer.membership.founds and not newcomer.life.left.is_set()

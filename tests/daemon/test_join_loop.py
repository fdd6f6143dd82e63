"""Asking to be let in, whoever is there: nobody, members that vanish, or only dead ones."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.consensus.familiar_peers import FamiliarPeers
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.daemon.node import membership
from p2p_dtfm.daemon.node.membership import Membership
from p2p_dtfm.daemon.peers.member_search import Found, Search, Sought, first_found
from p2p_dtfm.daemon.peers.wire import KnownPeers, PeerAddress
from p2p_dtfm.daemon.telemetry.status import Status
from p2p_dtfm.net.errors import Refused, Unreachable


class FakeAgreement:
    """Has a view once somebody living was asked `asked_for_view` times."""

    def __init__(self) -> None:
        self.view: object = None
        self.next_view = None
        self.attempting = False
        self.known_peers: tuple[str, ...] = ()
        self.familiar = FamiliarPeers("me")
        self.founded = False

    def wants_view(self) -> str:
        return "please"

    def found(self, now_ns: int) -> list[Any]:
        self.founded, self.view = True, "alone"
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
        """That live, and ask to be let in themselves."""
        self.passed_over: dict[str, str] = {}

    async def ask(self, peer_id: str, message: object) -> bytes:
        self.asked.append(peer_id)
        if peer_id in self.refuses:
            raise Refused("busy", peer_id)
        if peer_id in self.newcomers:
            return encode(KnownPeers((), lets_in=False))
        if peer_id not in self.living:
            raise Unreachable(peer_id, "no answer")
        self.agreement.view = "together"
        return encode(KnownPeers((PeerAddress("newly-named", ("/ip4/192.0.2.7/tcp/1",)),)))

    def learn(self, peer_id: str, addresses: Iterable[str]) -> None:
        self.known = (*self.known, peer_id)


class Newcomer(Membership):
    """With all that the loop touches, and nothing else."""

    def __init__(self, looks: Iterable[Found | None] = (), run: str = "") -> None:
        self._agreement = FakeAgreement()  # type: ignore[assignment]
        self._messenger = FakeMessenger(self._agreement)  # type: ignore[arg-type]
        self._me = SimpleNamespace(peer_id="me")
        self._run = SimpleNamespace(digest="ab" * 32)
        self._memory = None
        self._welcomed_by = self._asked_first = ""
        self._may_go_on_alone = bool(run)
        self._founds = False
        self.status = Status()
        self.settings = SimpleNamespace(run=run, initial_peers=())
        self.views = []
        self.looked = 0
        self.resumed = False
        self._looks = iter(looks)

    async def _call_again(self, memory: object) -> None:
        pass

    async def _look_for_members(self, run_digest: str) -> Found | None:
        self.looked += 1
        return next(self._looks, None)

    async def _resume_from_checkpoint(self) -> None:
        self.resumed = True

    async def _reunion_loop(self) -> None:
        pass

    def _do(self, actions: object) -> None:
        pass

    def _spawn(self, coroutine: Any) -> Any:
        return asyncio.ensure_future(coroutine)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "JOIN_RETRY_S", 0.001)
    monkeypatch.setattr(membership, "TICK_S", 0.001)
    monkeypatch.setattr(membership, "LOOK_AGAIN_S", 0.004)
    monkeypatch.setattr(membership, "LOOK_AGAIN_LIMIT_S", 0.02)
    monkeypatch.setattr(membership, "FOUNDS_AFTER_S", 0.016)


def play(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 5.0)

    asyncio.run(bounded())


def member(name: str) -> Found:
    welcome = SimpleNamespace(peers=[PeerAddress(name, ("/ip4/192.0.2.7/tcp/1",))])
    return Found(name, welcome, "met before")  # type: ignore[arg-type]


def test_who_knows_nobody_looks_until_somebody_is_found() -> None:
    newcomer = Newcomer([None, None, member("alive")])
    newcomer._messenger.living = {"alive"}  # type: ignore[attr-defined]
    newcomer.settings.initial_peers = ("given",)  # one that waits, and does not found
    play(newcomer._join_loop)
    assert newcomer._agreement.view == "together" and newcomer.looked == 3
    assert newcomer._messenger.asked == ["alive"]


def test_members_that_vanish_are_passed_over() -> None:
    newcomer = Newcomer()
    messenger = newcomer._messenger
    newcomer._welcomed_by = "first"
    messenger.known = ("dead-1", "dead-2", "last")
    messenger.heard_s = {"first": 3.0, "dead-1": 2.0, "dead-2": 1.0}
    messenger.living = {"last"}
    play(newcomer._join_loop)
    assert newcomer._agreement.view == "together" and newcomer.looked == 0
    assert messenger.asked[-1] == "last" and len(messenger.asked) <= 4


def test_a_member_that_is_only_busy_is_asked_again() -> None:
    newcomer = Newcomer()
    messenger = newcomer._messenger
    messenger.known, messenger.refuses, messenger.living = ("busy",), {"busy"}, {"busy"}

    async def calms_down() -> None:
        loop = asyncio.create_task(newcomer._join_loop())
        while len(messenger.asked) < 3:
            await asyncio.sleep(0.001)
        messenger.refuses.clear()
        await loop

    play(calms_down)
    assert set(messenger.asked) == {"busy"} and newcomer.looked == 0


def test_when_all_known_members_are_dead_it_says_so_and_waits_ever_longer() -> None:
    newcomer = Newcomer()
    newcomer.settings.initial_peers = ("given",)
    newcomer._messenger.known = ("dead-1", "dead-2")

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer._join_loop())
        said = set()
        while newcomer.looked < 6:
            await asyncio.sleep(0.001)
            said.add(newcomer.status.reason)
        assert not loop.done()
        assert any(text.startswith("no member of run abab") for text in said)
        newcomer._agreement.view = "let in by somebody who called"
        await loop

    play(for_a_while)
    assert not newcomer._agreement.founded, "who was told of peers never founds"


def test_who_came_back_to_members_that_then_died_goes_on_alone() -> None:
    newcomer = Newcomer(run="tiny")
    newcomer._welcomed_by = "died-since"
    play(newcomer._join_loop)
    assert newcomer.resumed and newcomer._agreement.founded and newcomer._founds


def test_two_newcomers_do_not_wait_for_each_other() -> None:
    """They came back as the last member died: each had found the other, and asked it for ever."""
    newcomer = Newcomer(run="tiny")
    newcomer._welcomed_by = "came-back-too"
    newcomer._messenger.newcomers = {"came-back-too"}  # type: ignore[attr-defined]
    play(newcomer._join_loop)
    assert newcomer.resumed and newcomer._agreement.founded


def test_who_may_not_go_on_alone_waits_with_another_newcomer() -> None:
    newcomer = Newcomer()
    newcomer._welcomed_by = "came-back-too"
    newcomer._messenger.newcomers = {"came-back-too"}  # type: ignore[attr-defined]

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer._join_loop())
        while newcomer.looked < 6:
            await asyncio.sleep(0.001)
        newcomer._messenger.newcomers = set()
        newcomer._messenger.living = {"came-back-too"}  # it is let in, or goes on alone
        await loop

    play(for_a_while)
    assert newcomer._agreement.view == "together" and not newcomer._agreement.founded


def test_who_has_been_in_a_view_never_founds_another() -> None:
    newcomer = Newcomer(run="tiny")
    newcomer.views = [{"view": 3}]

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer._join_loop())
        while newcomer.looked < 6:
            await asyncio.sleep(0.001)
        newcomer._agreement.view = "let in"
        await loop

    play(for_a_while)
    assert not newcomer._agreement.founded


def test_who_waits_for_an_agreed_view_says_so_again_and_again() -> None:
    """The members may have given it up while this peer was silent for a moment."""
    newcomer = Newcomer()
    messenger = newcomer._messenger
    newcomer._agreement.next_view = SimpleNamespace(member_ids=("first", "me", "second"))
    messenger.known = ("elsewhere",)
    messenger.refuses = {"first", "second"}

    async def for_a_while() -> None:
        loop = asyncio.create_task(newcomer._join_loop())
        while len(messenger.asked) < 4:
            await asyncio.sleep(0.001)
        newcomer._agreement.view = "let in"
        await loop

    play(for_a_while)
    assert set(messenger.asked) == {"first", "second"} and newcomer.looked == 0


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

    search = Search(None, None, None, own)  # type: ignore[arg-type]
    assert search.places(Sought("ab", ())) == "the directory"
    met = (("a", ()), ("b", ()))
    assert search.places(Sought("ab", met)) == "2 peers met before and the directory"


def test_who_cannot_go_on_alone_at_once_does_not_begin_it_twice() -> None:
    newcomer = Newcomer(run="tiny")
    agreement, resumed = newcomer._agreement, []

    async def resume() -> None:
        resumed.append(True)

    newcomer._resume_from_checkpoint = resume  # type: ignore[method-assign]
    agreement.found = lambda now_ns: []  # type: ignore[method-assign]

    async def twice() -> None:
        for _ in range(2):
            await newcomer._go_on_alone(agreement)

    play(twice)
    assert resumed == [True]

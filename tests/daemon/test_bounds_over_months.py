"""What a daemon remembers of others is bounded, however many come and go over months, each under a
new key."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node import other_versions
from p2p_dtfm.daemon.node.coming_and_going import entry
from p2p_dtfm.daemon.peers import messenger as messenger_module
from p2p_dtfm.daemon.peers import self_record
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.run_source import OtherProtocol
from p2p_dtfm.daemon.peers.self_record import SelfRecord
from p2p_dtfm.daemon.peers.wire import Hello
from p2p_dtfm.daemon.state_transfer.following.giving import SLOW_REMEMBERED
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.daemon.trainer.view_mail import ViewMail
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import now
from tests.core.builders import device
from tests.daemon.test_join_loop import WISH, Newcomer
from tests.daemon.trainer_parts import ME, SPEC, QuietOutlet, settle, trainer_tools, view_of

COMERS = [f"peer-{number}" for number in range(40)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock in seconds, which tests move."""
    time_s = [1000.0]
    monkeypatch.setattr(now, "monotonic_s", lambda: time_s[0])
    return time_s


def test_of_links_that_are_forgotten_it_is_forgotten_which_way_they_led(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name stayed for each peer that was ever probed, also in vain."""
    monkeypatch.setattr(self_record, "LINKS_KEPT", 8)

    async def nothing(peer_id: str) -> None: ...

    async def is_direct(peer_id: str) -> bool:
        return True

    async def measured(peer_id: str) -> int:
        if peer_id.endswith("7"):
            raise Unreachable(peer_id, "gone")
        return 1_000_000

    probes: Any = SimpleNamespace(probe_round_trip=measured, probe_bandwidth=measured)
    line: Any = SimpleNamespace(connect=nothing, knock=nothing, is_direct=is_direct)
    record = SelfRecord(Member("me", 1), "00" * 32, device(), (), probes)

    async def probe_all() -> None:
        for peer_id in COMERS:
            await record._probe(peer_id, line)

    asyncio.run(probe_all())
    assert set(record._straight) == set(record._links) and len(record._links) == 8
    assert record.forget_where_changed(dict.fromkeys(COMERS, False))
    assert not record._links and not record._straight


class Reached:
    """The host and control plane of a peer that reaches all others."""

    peer_id = "me"
    calling = SimpleNamespace(vouch=lambda peer_id: None)

    def __init__(self) -> None:
        self.asked: list[str] = []

    def know(self, peer_id: str, addresses: Any) -> None: ...

    async def connect(self, peer_id: str, addresses: Any, deadline_s: float) -> None: ...

    async def call(self, peer_id: str, body: bytes, deadline_s: float) -> bytes:
        self.asked.append(peer_id)
        return b""


def test_peers_that_were_once_connected_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a call in vain had a peer forgotten, and nobody calls one that has left in order."""
    monkeypatch.setattr(messenger_module, "PEERS_LIMIT", 8)
    host: Any = Reached()

    async def meet_all() -> int:
        messenger = Messenger(host, host, 1)
        for peer_id in COMERS:
            messenger.learn(peer_id, ("/ip4/5.9.0.1/tcp/4001",))
            await messenger.ask(peer_id, Hello(1, ()))
        return len(messenger._connected)

    assert asyncio.run(meet_all()) == 8


def test_nothing_is_told_once_the_messenger_is_closed() -> None:
    """Calls are answered for a moment longer. What came of one began a task that nobody ended: it
    lived on for a minute."""
    host: Any = Reached()

    async def close_and_tell() -> set[str]:
        messenger = Messenger(host, host, 1)
        messenger.tell("other", Hello(1, ()))
        await messenger.close()
        for peer_id in ("other", "one more"):
            messenger.tell(peer_id, Hello(2, ()))
        await settle()
        return {str(task.get_coro()) for task in asyncio.all_tasks() - {asyncio.current_task()}}

    assert asyncio.run(close_and_tell()) == set()
    assert host.asked == ["other"]


def agreed_view(number: int) -> View:
    found = view_of(number, 2)
    return View(msgspec.structs.replace(found.snapshot, planned=True), found.plan)


def test_views_that_were_agreed_on_and_never_began_leave_no_mailboxes() -> None:
    """A newcomer that never gets its states has its view given up, and is asked for again: what was
    due in each of these views stayed until some view took over."""
    mail = ViewMail(ME, SPEC, state := TrainerState())
    state.view = agreed_view(1)
    mail.agreed(state.view)
    mail.take_over(state.view, None)
    for number in range(2, 42):
        mail.agreed(agreed_view(number))
    assert set(mail._mailboxes) == {state.view.id, agreed_view(41).id}
    assert mail.of_stage(state.view.id) is mail.mailbox(state.view.id)
    mail.take_over(earlier := agreed_view(40), None)
    assert mail.of_stage(earlier.id), "should it take over after all"


def test_who_is_in_no_view_keeps_nothing_that_came_in_one() -> None:
    mail = ViewMail(ME, SPEC, state := TrainerState())
    for number in (1, 2):
        mail.agreed(agreed_view(number))
    mail.take_over(agreed_view(1), None)
    state.view = None
    mail.leave_views()
    assert not mail._mailboxes


def test_donors_whose_states_were_refused_are_forgotten(tmp_path: Path) -> None:
    tools = trainer_tools(tmp_path)
    followers = Followers(tools, QuietOutlet(), TrainerState())
    followers._stop = lambda follower: None  # type: ignore[method-assign]
    for number in range(3 * SLOW_REMEMBERED):
        follower: Any = SimpleNamespace(layers={0}, came_from={0: {f"peer-{number}"}})
        followers.follower = follower
        followers.refuse([0])
    tools.compute.close()
    assert len(followers._slow_donors) <= SLOW_REMEMBERED


def test_states_of_ends_that_nothing_takes_leave_no_name(tmp_path: Path) -> None:
    offers = Offers(tmp_path / "offers", memory_limit_bytes=10)
    (tmp_path / "offers").rmdir()
    large = offers.put(b"larger than all", True)
    for number in range(9):
        with pytest.raises(OSError, match="offers"):
            offers.put(f"state {number}".encode(), True)
    assert offers._of_ends == {large}


@pytest.mark.parametrize("how", ["refuses", "newcomers", "complete"])
def test_what_peers_have_answered_to_a_newcomer_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Who waits for days before it is let in asks whoever comes by, each under a new key."""
    monkeypatch.setattr(entry, "PEERS_LIMIT", 8)
    monkeypatch.setattr(entry, "shows_end", lambda *facts: True)
    newcomer = Newcomer()
    setattr(newcomer.messenger, how, set(COMERS))
    newcomer.agreement.familiar.meet(COMERS)

    async def ask_all() -> None:
        for peer_id in COMERS:
            await newcomer._ask_to_be_let_in(peer_id, WISH)

    asyncio.run(ask_all())
    kept = {
        "refuses": newcomer._refusals,
        "newcomers": newcomer._as_new,
        "complete": newcomer._ends,
    }
    assert list(kept[how]) == COMERS[-8:]


def test_of_whom_the_log_has_said_that_it_speaks_otherwise_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(other_versions, "PEERS_LIMIT", 8)
    passed_over: dict[str, Any] = {}
    network: Any = SimpleNamespace(messenger=SimpleNamespace(passed_over=passed_over))
    local: Any = SimpleNamespace()
    others = other_versions.OtherVersions(local, network, lambda peer_id: True)
    for peer_id in COMERS:
        passed_over.clear()
        passed_over[peer_id] = OtherProtocol(peer_id, 99)
        others.say()
    assert list(others._told) == COMERS[-8:]

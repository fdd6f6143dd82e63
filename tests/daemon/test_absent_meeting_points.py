"""Initial peers that are away when a daemon starts are where others look for the run later. Lost
members are looked for nearby."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.invited.chains import NOT_INVITED
from p2p_dtfm.daemon.node.network import CALLED_LIMIT, Network
from p2p_dtfm.daemon.peers.bootstrap_node import REFUSAL
from p2p_dtfm.daemon.peers.home_memory import acquaintance
from p2p_dtfm.daemon.peers.recall import Past
from p2p_dtfm.net.contacts.nearby import Neighbour
from p2p_dtfm.net.errors import Unreachable
from tests.daemon.test_coming_back_parts import acquaintances_of, network_of
from tests.daemon.test_memory import memory_of, peer_ids


def test_initial_peers_that_were_not_reached_are_called_again(tmp_path: Path) -> None:
    """A daemon called again only the peers that answered at its start. One without arguments called
    none."""
    ids = peer_ids(tmp_path, 3)
    points = [f"/ip4/192.0.2.7/tcp/4001/p2p/{peer_id}" for peer_id in ids]
    memory = msgspec.structs.replace(memory_of(tmp_path), meeting_points=tuple(points[1:]))
    run: Any = SimpleNamespace(digest=memory.run_digest, signed_spec=memory.signed_spec)
    network = network_of()
    network.first_contacts = ()
    past = Past([memory], memory)
    for given, called in (
        ((), points[1:]),
        ((points[0], points[1]), points),
        (tuple(f"/ip4/192.0.2.7/tcp/{port}/p2p/{ids[0]}" for port in range(1, 99)), None),
    ):
        called_at: list[str] = []
        known: Any = acquaintances_of(tmp_path, network, past, initial_peers=given)
        known.directory = SimpleNamespace(call_again_at=called_at.extend)
        asyncio.run(known.begin_to_remember(run))
        assert called_at == called or (called is None and len(called_at) == CALLED_LIMIT)


async def _not_invited(peer_id: str) -> None:
    raise PeerFault(f"{NOT_INVITED}: this run is by invitation", peer_id)


async def _silent(peer_id: str) -> None:
    raise Unreachable(peer_id, "no answer within 3 s")


async def _lets_in(peer_id: str) -> None: ...


async def _trains_nothing(peer_id: str) -> None:
    raise PeerFault(REFUSAL, peer_id)


def test_one_that_trains_another_run_by_invitation_says_nothing_of_this_one(tmp_path: Path) -> None:
    """A service that had been told so never tried again."""
    ids = peer_ids(tmp_path, 2)
    network = network_of()
    network.first_contacts = tuple(f"/ip4/192.0.2.7/tcp/1/p2p/{peer_id}" for peer_id in ids)
    reason = UserError("could not join the directory through ADDRESS: CAUSE", "x", exit_code=6)
    for answers, exit_code in (
        ((_not_invited, _not_invited), 5),
        ((_not_invited, _silent), 6),
        ((_not_invited, _lets_in), 6),
        ((_trains_nothing, _not_invited), 5),
        ((_trains_nothing, _trains_nothing), 6),
    ):
        said = dict(zip(ids, answers, strict=True))
        network.messenger.ask = lambda peer_id, hello, limit_s, said=said: said[peer_id](peer_id)
        why = asyncio.run(Network.why_turned_away(network, reason))
        assert why.exit_code == exit_code
    network.first_contacts = ()
    assert asyncio.run(Network.why_turned_away(network, reason)) is reason


def test_every_member_asks_nearby_for_those_that_it_has_lost(tmp_path: Path) -> None:
    """Two members got new addresses at once and never met again. Each asked nearby only when it
    came back, and only for those that it knew then."""
    here, gone, silent, stranger, liar = peer_ids(tmp_path, 5)
    met = [acquaintance(it, ["/ip4/192.0.2.7/tcp/4001"], 5) for it in (here, gone, silent)]
    learned: dict[str, tuple[str, ...]] = {}
    heard_of: list[str] = []
    known: list[str] = []
    network = network_of()
    network.messenger.learn = learned.__setitem__
    network.messenger.hear_of = lambda peer_id, addresses: heard_of.append(peer_id)
    agreement: Any = SimpleNamespace(
        view=SimpleNamespace(member_ids=("me", here)), suspected=(), know=known.append
    )
    memory = memory_of(tmp_path)
    joined: Any = acquaintances_of(tmp_path, network, Past([], memory))
    asked: list[str] = []

    async def ask(run_digest: str, on_answer: Any) -> None:
        asked.append(run_digest)
        for peer_id, knows in (
            (here, True),
            (gone, False),
            (silent, True),
            (stranger, True),
            (liar, False),
        ):
            on_answer(Neighbour(peer_id, "/ip4/10.0.0.9/tcp/4002", knows))

    async def meet(peer_ids: list[str]) -> None: ...

    joined._nearby, joined.directory = SimpleNamespace(ask=ask), SimpleNamespace(meet=meet)

    async def one_turn() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(joined.ask_nearby_for_the_lost(agreement), 0.05)

    asyncio.run(one_turn())
    assert not asked, "it misses nobody that it has met"
    joined.memory = memory.met(met)  # since it has joined
    agreement.view.member_ids = ("me", here, silent)
    agreement.suspected = (silent,)
    asyncio.run(one_turn())
    assert asked == [memory.run_digest]
    assert sorted(learned) == sorted((gone, silent))
    assert learned[gone] == (f"/ip4/10.0.0.9/tcp/4002/p2p/{gone}", "/ip4/192.0.2.7/tcp/4001")
    assert heard_of == [stranger] and known == [gone, silent, stranger]
    asked.clear()
    agreement.view = None
    asyncio.run(one_turn())
    assert not asked, "who asks to be let in looks for all of them anyway"

"""A p2pd that has no time to answer, as on a machine that swaps, ends no daemon."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.invited.line import read_line
from p2p_dtfm.core.protocol.records import Reachability
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.node.daemon import _print_invitation
from p2p_dtfm.daemon.node.join import leads, measuring
from p2p_dtfm.daemon.node.join.leads import Leads
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.status_api import StatusApi
from p2p_dtfm.daemon.peers import reachability
from p2p_dtfm.daemon.peers.reachability import ReachabilityService
from p2p_dtfm.daemon.peers.recall import Past
from p2p_dtfm.net.errors import NO_ANSWER, P2PD_HAS_ENDED, Unreachable
from p2p_dtfm.net.nat.dial_back import SeenAddress
from tests.core.builders import device, run_spec
from tests.daemon.test_coming_back_parts import acquaintances_of, network_of, settings_of

RELAY = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
OWN = "/ip4/192.0.2.7/tcp/4001"


class SlowHost:
    """A host whose p2pd does not answer at first."""

    peer_id = "me"
    is_only_local = False
    shaper = None
    found_addresses = ()

    def __init__(self, cause: str = f"{NO_ANSWER} 5 s", times: int = 1) -> None:
        self.asked = 0
        self._cause, self._times = cause, times

    async def addresses(self) -> tuple[str, ...]:
        self.asked += 1
        if self.asked <= self._times:
            raise Unreachable("me", self._cause)
        return (OWN,)


@pytest.fixture(autouse=True)
def asks_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "OWN_AGAIN_S", 0.001, raising=False)


async def nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def test_its_ports_are_known_a_moment_later() -> None:
    """The daemon ended with "a peer that this one works with is gone: its own id", and exit code
    6."""
    service = ReachabilityService(SlowHost())  # type: ignore[arg-type]
    for part in (service._callbacks, service._punching, service.relay):
        part.ready = nothing  # type: ignore[assignment, method-assign]
    asyncio.run(service.ready())
    assert service._ports == (4001,)


def test_its_relays_are_found_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer behind a router did not start: it ended with the same words, once others had looked
    for it."""
    host, reserved, looks = SlowHost(), list[str](), iter([False, True, True])
    service = ReachabilityService(host)  # type: ignore[arg-type]

    async def remote_addresses() -> dict[str, list[str]]:
        if not next(looks):
            raise Unreachable("me", f"{NO_ANSWER} 5 s")
        return {RELAY: ["/ip4/192.0.2.8/tcp/4001"]}

    async def see(peer_id: str) -> SeenAddress:
        return SeenAddress("192.0.2.9", 4001, ())

    async def reserve(host: object, relay: str) -> float:
        reserved.append(relay)
        return 3600.0

    async def scene() -> None:
        found = await service.find([f"/ip4/192.0.2.8/tcp/4001/p2p/{RELAY}"])
        assert found.reachability is Reachability.UNREACHABLE and not reserved
        await service._look_after()
        assert reserved == [RELAY] and service.relays == (RELAY,)

    host.remote_addresses = remote_addresses  # type: ignore[attr-defined]
    host.calling = SimpleNamespace(trusts=lambda peer_id: True)  # type: ignore[attr-defined]
    monkeypatch.setattr(reachability, "reserve", reserve)
    monkeypatch.setattr(service, "_see", see)
    asyncio.run(scene())


def test_who_looks_on_its_local_network_for_it_finds_it(tmp_path: Path) -> None:
    answered: list[int] = []

    async def answer(run_digest: str, port: int, *_: Any, only_known: bool) -> None:
        answered.append(port)

    network = network_of()
    network.host = SlowHost()
    known: Any = acquaintances_of(tmp_path, network, Past([], None))
    known._nearby = SimpleNamespace(answer=answer)
    asyncio.run(known._answer_nearby("digest", only_known=False))
    assert answered == [4001]


def test_it_asks_which_run_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, ...]] = []

    async def find(messenger: Any, directory: Any, initial: Any, own: Any, *_: Any) -> Any:
        told.append(own)
        return "peer", "welcome"

    async def join(peer_id: str, welcome: Any) -> Any:
        return "run"

    monkeypatch.setattr(leads, "find_run", find)
    network = network_of()
    network.host = SlowHost()
    local = Local(settings_of(tmp_path), DashboardHost())
    asking = Leads(local, network, acquaintances_of(tmp_path, network, Past([], None)))
    asking._join_found = join  # type: ignore[method-assign]
    assert asyncio.run(asking.ask_which_run("")) == "run"  # type: ignore[comparison-overlap]
    assert told == [(OWN,)]


def test_its_first_record_says_where_it_is(tmp_path: Path) -> None:
    """On loopback nothing would correct the record later."""
    local = Local(settings_of(tmp_path, device="cpu"), DashboardHost())
    local.world = SimpleNamespace(  # type: ignore[assignment]
        measure_device=lambda *_: device(), stage_runner=lambda *_: None
    )
    network: Any = SimpleNamespace(
        me=SimpleNamespace(peer_id="me", life=1),
        host=SlowHost(),
        probes=None,
        others=list,
        messenger=None,
        reachability=SimpleNamespace(finding=SimpleNamespace(reachability=Reachability.DIRECT)),
    )
    run: Any = SimpleNamespace(spec=run_spec(), digest="00" * 32)
    record = asyncio.run(measuring.measure(local, network, run))
    local.compute.close()
    assert record.addresses == (OWN,)


def test_a_founder_prints_the_line_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    spec: Any = SimpleNamespace(name="tiny", admission=SimpleNamespace(is_invited=False))
    participant: Any = SimpleNamespace(
        network=SimpleNamespace(host=SlowHost()),
        checkpoints=SimpleNamespace(saved=()),
        local=SimpleNamespace(settings=SimpleNamespace(initial_peers=())),
        membership=SimpleNamespace(
            run=SimpleNamespace(digest="ab" * 32, spec=spec),
            acquaintances=SimpleNamespace(comes_back=False),
        ),
    )
    asyncio.run(_print_invitation(participant))
    assert f"--initial-peers {OWN}" in capsys.readouterr().out


def test_who_invites_others_gets_its_line(tmp_path: Path) -> None:
    """`p2p-dtfm invite` gave no line, and left a traceback in the daemon's log."""
    local = Local(settings_of(tmp_path), DashboardHost())
    network: Any = SimpleNamespace(
        me=SimpleNamespace(peer_id="me"), host=SlowHost(), guest_book=None
    )
    api = StatusApi(local, network)
    api.participant = SimpleNamespace(  # type: ignore[assignment]
        membership=SimpleNamespace(
            agreement=SimpleNamespace(view=None),
            acquaintances=SimpleNamespace(memory=None),
            run=SimpleNamespace(digest="ab" * 32),
        ),
        trainer=SimpleNamespace(done=asyncio.Event()),
    )
    made = asyncio.run(api.invite({}))
    local.compute.close()
    assert read_line(made["line"]).addresses == (OWN,)


def test_one_that_has_ended_is_not_waited_for_and_no_other_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead = SlowHost(P2PD_HAS_ENDED, 9)
    with pytest.raises(Unreachable, match="has ended"):
        asyncio.run(reachability.own_addresses(dead))  # type: ignore[arg-type]
    assert dead.asked == 1
    monkeypatch.setattr(reachability, "OWN_PATIENCE_S", 0.05)
    assert asyncio.run(reachability.own_addresses(SlowHost(times=10**6))) == ()  # type: ignore[arg-type]

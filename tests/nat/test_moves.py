"""A machine that gets another address while its peer lives: others are told the new one."""

import time
from pathlib import Path

import pytest

from p2p_dtfm.daemon.machine.home import place_of_run
from p2p_dtfm.daemon.peers.home_memory import read_memory
from p2p_dtfm.testbed.local_swarm import Child
from tests.e2e.helpers import assert_nothing_is_left, step_of, wait_until, write_endless_spec
from tests.nat.home_networks import Network, missing
from tests.nat.swarm import PORT, HomeSwarm
from tests.nat.test_links import PATIENCE_S, Peer
from tests.programs import skip_without

pytestmark = skip_without("translation", missing())
LISTEN = f"/ip4/0.0.0.0/tcp/{PORT}"


def test_p2pd_says_where_its_machine_is_now() -> None:
    """`daemon.node.background.presence` relies on it: within 5 s, as it was seen."""
    with Network() as network:
        place, address = network.public()
        peer = Peer(place, LISTEN)
        peer.begin()
        try:
            assert [at.split("/")[2] for at in peer.addresses] == [address]
            address, end_s = network.move(place), time.monotonic() + PATIENCE_S
            while [at.split("/")[2] for at in peer.ok("addresses")] != [address]:
                assert time.monotonic() < end_s, "p2pd keeps to the old address"
                time.sleep(0.5)
        finally:
            peer.end()


def hosts_of(child: Child) -> set[str]:
    """Where others are told to join."""
    return {at.split("/")[2] for at in (child.status() or {}).get("addresses", ())}


def way_of(child: Child) -> str:
    return (child.status() or {}).get("reachability", {}).get("reachability", "")


@pytest.mark.nightly
def test_a_member_that_moves_behind_a_firewall_is_found_there(tmp_path: Path) -> None:
    """It could be called; where it is now a relay has to pass others on."""
    spec = write_endless_spec(tmp_path)
    with Network() as network, HomeSwarm(tmp_path / "swarm") as swarm:
        (there, host), (place, old) = network.public(), network.public()
        founder = swarm.daemon(there, ["--run", str(spec), "--listen", LISTEN])
        wait_until(lambda: hosts_of(founder) == {host}, "the founder trains", 120)
        at = (founder.status() or {})["addresses"][0]
        mover = swarm.daemon(place, ["--initial-peers", at, "--listen", LISTEN])
        wait_until(lambda: hosts_of(mover) == {old} and step_of(mover) > 2, "both train", 120)
        assert way_of(mover) == "direct"

        new = network.move(place, firewall=True)
        wait_until(lambda: hosts_of(mover) == {host, new}, "it tells where it is now", 240)
        assert way_of(mover) == "relayed"
        known = mover.status() or {}

        def is_remembered() -> bool:
            memory = read_memory(place_of_run(founder.home, known["run_digest"]))
            met = {it.peer_id: it.addresses for it in memory.members} if memory else {}
            return any(f"/{new}/" in address for address in met.get(known["peer_id"], ()))

        wait_until(is_remembered, "the founder remembers it there", 120)
    assert_nothing_is_left(tmp_path)

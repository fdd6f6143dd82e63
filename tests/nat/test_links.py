"""What libp2p and our relay do between routers, without daemons: one host in each namespace."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nat.home_networks import HOME, Namespace, Network, missing
from tests.programs import skip_without

pytestmark = skip_without("translation", missing())
PORT = 4001
RELAY_MBPS = 8
PATIENCE_S = 60.0


class Peer:
    """`tests.nat.peer` in a namespace."""

    def __init__(self, place: Namespace, *listen: str, flags: tuple[str, ...] = ()) -> None:
        command = [*place.enter, sys.executable, "-m", "tests.nat.peer", json.dumps(flags), *listen]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=dict(os.environ),
        )
        self.peer_id, self.addresses = "", []

    def begin(self) -> None:
        self.peer_id, self.addresses = self.answer()

    def say(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has ended"
        return json.loads(line)

    def do(self, *command: object) -> dict[str, Any]:
        self.say(*command)
        return self.answer()

    def ok(self, *command: object) -> Any:
        answer = self.do(*command)
        assert "ok" in answer, answer
        return answer["ok"]

    def way_to(self, other: "Peer") -> str:
        return self.ok("list")[other.peer_id][0]

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


class Homes:
    """A public relay, two homes whose routers can be punched, and one whose router cannot."""

    def __init__(self, network: Network) -> None:
        place, self.public_host = network.public()
        network.limit(place, RELAY_MBPS)
        homes = [network.home(), network.home(), network.home(symmetric=True)]
        self.routers = [router for _, router in homes]
        self.address = f"/ip4/{self.public_host}/tcp/{PORT}"
        self.relay = Peer(place, self.address)
        self.peers = [Peer(machine) for machine, _ in homes]
        for peer in (self.relay, *self.peers):
            peer.begin()
        for peer in self.peers:
            peer.ok("connect", self.relay.peer_id, self.address)
        self.circuit = f"{self.address}/p2p/{self.relay.peer_id}/p2p-circuit"

    def close(self) -> None:
        for peer in (self.relay, *self.peers):
            peer.end()


@pytest.fixture(scope="module")
def homes() -> Iterator[Homes]:
    with Network() as network:
        made = Homes(network)
        try:
            yield made
        finally:
            made.close()


def test_p2pds_own_relay_cuts_circuits_short(homes: Homes) -> None:
    """Why there is another. When this fails, p2pd has changed and `net.nat.relay` may go."""
    first, second, _ = homes.peers
    refused = second.do("reserve", homes.relay.peer_id)
    assert "it relays a few bytes only" in refused["error"]
    first.ok("connect", second.peer_id, homes.circuit)
    assert "error" in first.do("bandwidth", second.peer_id), "more than 128 KiB went through"
    homes.relay.ok("serve_relay")


def test_nobody_gets_through_a_router_uncalled(homes: Homes) -> None:
    for peer in homes.peers:
        peer.say("look", homes.relay.peer_id)
    for peer, router in zip(homes.peers, homes.routers, strict=True):
        host, _, open_ports = peer.answer()["ok"]
        assert (host, open_ports) == (router, [])
        assert peer.addresses[0].startswith(f"/ip4/{HOME}/tcp/")


def test_a_circuit_carries_as_much_as_the_relay_can(homes: Homes) -> None:
    first, _, third = homes.peers
    assert "NO_RESERVATION" in homes.peers[1].do("connect", third.peer_id, homes.circuit)["error"]
    assert third.ok("reserve", homes.relay.peer_id) > 3000
    first.ok("connect", third.peer_id, homes.circuit)
    assert first.way_to(third) == homes.circuit
    rate = first.ok("bandwidth", third.peer_id)
    assert rate < RELAY_MBPS * 1e6 / 8 * 1.3
    assert first.ok("round_trip", third.peer_id) > 0


def test_a_router_that_cannot_be_punched_leaves_the_relay(homes: Homes) -> None:
    first, _, third = homes.peers
    assert first.ok("punch", third.peer_id, homes.circuit) is False
    assert first.way_to(third) == homes.circuit
    assert first.ok("round_trip", third.peer_id) > 0, "and it still works"


def test_two_routers_are_punched_and_the_link_is_faster(homes: Homes) -> None:
    first, second, _ = homes.peers
    second.ok("reserve", homes.relay.peer_id)
    first.ok("connect", second.peer_id, homes.circuit)
    relayed = first.ok("bandwidth", second.peer_id)
    assert first.ok("punch", second.peer_id, homes.circuit) is True
    port = second.addresses[0].split("/")[4]
    assert first.way_to(second) == f"/ip4/{homes.routers[1]}/tcp/{port}"
    end_s = time.monotonic() + PATIENCE_S
    while first.ok("bandwidth", second.peer_id) < 2 * relayed:  # a busy machine is slow at times
        assert time.monotonic() < end_s, "the direct link is not faster"

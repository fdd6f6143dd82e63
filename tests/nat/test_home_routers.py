"""Peers behind home routers take part: through a relay, and directly where the routers allow it."""

import signal
from pathlib import Path

import pytest

from p2p_dtfm.daemon.machine.local_client import ask_daemon
from p2p_dtfm.testbed.local_swarm import Child
from tests.e2e.helpers import assert_nothing_is_left, logged, step_of, wait_until, write_spec
from tests.e2e.parity import assert_equals_the_plain_loop
from tests.nat.home_networks import Network, missing
from tests.nat.swarm import HomeSwarm
from tests.programs import skip_without

pytestmark = [
    skip_without("translation", missing()),
    pytest.mark.nightly,
]
STEPS = 60
RELAY_MBPS = 40
THIRD_OF_THE_MODEL_GIB = "0.0028"


@pytest.fixture(autouse=True)
def no_daemon_is_left(tmp_path: Path):
    yield
    assert_nothing_is_left(tmp_path)


def status_of(child: Child) -> dict:
    return child.status() or {"reachability": {}}


def links_of(child: Child) -> dict[str, dict]:
    """What a peer has measured of its links, in the view in force."""
    me = status_of(child).get("peer_id")
    records = ask_daemon(child.home, "peers") or []
    return next((record["links"] for record in records if record["peer_id"] == me), {})


def ways_of(child: Child) -> dict[str, str]:
    """Of each other member, how bytes travel to it."""
    records = ask_daemon(child.home, "peers") or []
    return {record["peer_id"]: record["way"] for record in records if record["way"]}


def test_peers_behind_routers_train_and_outlive_a_relay(tmp_path: Path) -> None:
    """Two relays; two homes whose routers can be punched, and one whose router cannot."""
    spec = write_spec(
        tmp_path,
        total_steps=STEPS,
        model={"layers": 4, "width": 64, "heads": 2, "context": 64, "vocabulary": 256},
        evaluation={"every_steps": 1000, "sequences": 4},
        optimizer={"peak_learning_rate": 2e-4, "warmup_steps": 20},
    )
    with Network() as network, HomeSwarm(tmp_path / "swarm") as swarm:
        places = [network.public(), network.public()]
        for place, _ in places:
            network.limit(place, RELAY_MBPS)
        nodes = [swarm.bootstrap(*place) for place in places]
        own = ["--exit-when-done", "--memory-gib", THIRD_OF_THE_MODEL_GIB]
        for _, address in nodes:
            own += ["--initial-peers", address]
        homes = [network.home(), network.home(), network.home(symmetric=True)]
        founder = swarm.daemon(
            homes[0][0], [*own, "--run", str(spec), "--expect-peers", "3", "--expect-wait-s", "200"]
        )
        wait_until(lambda: status_of(founder).get("run_digest"), "the founder has a run", 90)
        digest = status_of(founder)["run_digest"]
        others = [swarm.daemon(home, [*own, "--run-digest", digest]) for home, _ in homes[1:]]
        everyone = [founder, *others]
        for child, (_, router) in zip(everyone, homes, strict=True):
            wait_until(
                lambda c=child: len(status_of(c)["reachability"].get("relays", ())) == 2, "relays"
            )
            assert status_of(child)["reachability"]["reachability"] == "relayed"
            assert status_of(child)["reachability"]["public_host"] == router

        wait_until(lambda: step_of(founder) >= 5, "they train")
        straight, crooked = (status_of(child)["peer_id"] for child in others)
        assert status_of(others[1])["layers"], "the peer that only relays reach has a stage"
        wait_until(lambda: ways_of(founder).get(straight) == "direct", "a direct connection")
        for child in everyone[:2]:
            wait_until(lambda c=child: crooked in ways_of(c), "the way to the other one is seen")
        wait_until(lambda: crooked in links_of(founder), "and measured")
        way = ways_of(founder)[crooked]
        assert way.startswith("relayed by ") and ways_of(others[0])[crooked].startswith("relayed")
        measured = links_of(founder)[crooked]["bytes_per_s"]
        assert measured < 2 * RELAY_MBPS * 1e6 / 8, (
            "the plan knows the link as the relay carries it"
        )

        node = next(node for node, address in nodes if address.endswith(way.split()[-1]))
        node.process.send_signal(signal.SIGKILL)
        killed_at = step_of(founder)
        wait_until(lambda: logged(founder, "is gone: those that it passed on"), "it is noticed")
        wait_until(lambda: step_of(founder) > killed_at + 10, "they train on without that relay")
        for child in everyone:
            assert child.process.wait(240) == 0, child.log_tail()
    assert_equals_the_plain_loop(founder, STEPS)


def test_peers_whose_routers_forward_a_port_call_each_other(tmp_path: Path) -> None:
    """Neither had a relay, or an address that is valid outside of its home."""
    spec = write_spec(tmp_path, total_steps=1000)
    port = 31330
    with Network() as network, HomeSwarm(tmp_path / "swarm") as swarm:
        _, meeting_point = swarm.bootstrap(*network.public())
        homes = [network.home(forwarded_ports=[port, port + 1]) for _ in range(2)]
        own = ["--initial-peers", meeting_point, "--listen", f"/ip4/0.0.0.0/tcp/{port}"]
        founding = [*own, "--run", str(spec), "--expect-peers", "2", "--expect-wait-s", "200"]
        founder = swarm.daemon(homes[0][0], founding)
        wait_until(lambda: status_of(founder).get("run_digest"), "the founder has a run", 90)
        digest = status_of(founder)["run_digest"]
        other = swarm.daemon(homes[1][0], [*own, "--run-digest", digest])
        wait_until(lambda: step_of(founder) >= 3, "they train")
        for child, (_, router) in zip((founder, other), homes, strict=True):
            status = status_of(child)
            assert status["reachability"]["reachability"] == "direct"
            assert f"/ip4/{router}/tcp/{port}/p2p/{status['peer_id']}" in status["addresses"]
        assert set(ways_of(founder).values()) == {"direct"}

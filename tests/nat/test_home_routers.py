"""Peers behind home routers take part: through a relay, and directly where the routers allow it."""

import itertools
import json
from pathlib import Path

import pytest

from p2p_dtfm.daemon.local_client import ask_daemon
from p2p_dtfm.daemon.local_swarm import Child
from tests.e2e.helpers import processes_of, step_of, wait_until, write_spec
from tests.e2e.parity import assert_equals_the_plain_loop
from tests.nat.home_networks import Network, missing
from tests.nat.swarm import HomeSwarm

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
STEPS = 40


@pytest.fixture(autouse=True)
def no_daemon_is_left(tmp_path: Path):
    yield
    assert not processes_of(tmp_path)


def way_in(child: Child) -> dict:
    return (child.status() or {}).get("way_in", {})


def peers_of(child: Child) -> list[dict]:
    return ask_daemon(child.home, "peers") or []


def peer_id_of(child: Child) -> str:
    status = child.status()
    assert status is not None, child.log_tail()
    return status["peer_id"]


def ways(child: Child) -> dict[str, str]:
    """Of each other member, how bytes travel to it."""
    return {peer["peer_id"]: peer["way"] for peer in peers_of(child) if peer["way"]}


def digest_of(child: Child) -> str:
    status = child.status()
    return (status or {}).get("run_digest") or ""


def test_peers_behind_routers_train_together(tmp_path: Path) -> None:
    """A public bootstrap node; two homes whose routers can be punched, one whose cannot."""
    spec = write_spec(
        tmp_path,
        total_steps=STEPS,
        evaluation={"every_steps": 1000, "sequences": 4},
        optimizer={"peak_learning_rate": 2e-4, "warmup_steps": 20},
    )
    with Network() as network, HomeSwarm(tmp_path / "swarm") as swarm:
        node, address = swarm.bootstrap(*network.public())
        homes = [network.home()[0], network.home()[0], network.home(symmetric=True)[0]]
        own = ["--initial-peers", address, "--exit-when-done"]
        founder = swarm.daemon(homes[0], [*own, "--run", str(spec), "--expect-peers", "3"])
        wait_until(lambda: digest_of(founder), "the founder has a run", 60)
        others = [swarm.daemon(h, [*own, "--run-digest", digest_of(founder)]) for h in homes[1:]]
        everyone = [founder, *others]
        for child in everyone:
            wait_until(lambda c=child: way_in(c).get("relays"), "a relay", 60)
            assert way_in(child)["reachability"] == "relayed"
        a, b, c = map(peer_id_of, everyone)
        wait_until(lambda: all(len(ways(child)) == 2 for child in everyone), "a view of three", 60)
        print([peers_of(child) for child in everyone])
        wait_until(lambda: ways(founder)[b] == "direct", "a direct way", 30)
        assert ways(founder)[c] == ways(others[0])[c] == "relayed"
        for child in everyone:
            assert child.process.wait(120) == 0, child.log_tail()
    for child in everyone: print(child.name, (child.home/"stderr").read_text())
    print((node.home/"stderr").read_text())
    assert_equals_the_plain_loop(founder, STEPS)

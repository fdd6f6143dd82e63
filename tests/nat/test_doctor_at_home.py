"""The doctor tells direct, relayed and unreachable apart, and what would open the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nat.home_networks import HOME, Network, missing
from tests.nat.swarm import PORT, HomeSwarm
from tests.programs import skip_without

pytestmark = skip_without("translation", missing())
ANY = "/ip4/0.0.0.0/tcp/0"
FORWARDED = 4001


@pytest.mark.nightly
def test_each_place_gets_its_finding_and_one_fix(tmp_path: Path) -> None:
    with Network() as network, HomeSwarm(tmp_path) as swarm:
        _, address = swarm.bootstrap(*network.public())
        _, unwilling = swarm.bootstrap(*network.public(), "--no-relay")
        public, public_host = network.public()
        closed, closed_host = network.public(firewall=True)
        home, router = network.home()
        open_home, open_router = network.home(forwarded_ports=[FORWARDED])
        nobody = address.replace(str(PORT), "9")
        dropped = address.replace(address.split("/")[2], closed_host)
        own_port = f"/ip4/0.0.0.0/tcp/{FORWARDED}"
        cases = [
            (public.pid, ANY, address),
            (open_home.pid, own_port, address),
            (home.pid, own_port, address),
            (home.pid, ANY, unwilling),
            (closed.pid, own_port, unwilling),
            (home.pid, ANY, nobody),
            (home.pid, ANY, dropped),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "tests.nat.doctor_cases", json.dumps(cases)],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    reach = [result["reachability"] for result in found]

    assert (reach[0]["verdict"], reach[0]["reachability"]) == ("ok", "direct")
    assert public_host in reach[0]["found"]

    assert (reach[1]["verdict"], reach[1]["reachability"]) == ("ok", "direct")
    assert f"{open_router}, TCP port {FORWARDED}" in reach[1]["found"]

    assert (reach[2]["verdict"], reach[2]["reachability"]) == ("warning", "relayed")
    ports = f"TCP ports {FORWARDED} and {FORWARDED + 1} (the second for direct lines)"
    assert reach[2]["fix"] == (
        f"nothing must be done; for faster links: on the router at {router}, forward {ports} to "
        f"{HOME}, and start with --listen {own_port}"
    )

    assert (reach[3]["verdict"], reach[3]["reachability"]) == ("failed", "unreachable")
    ports = "TCP ports 31330 and 31331 (the second for direct lines)"
    assert f"forward {ports} to {HOME}" in reach[3]["fix"]

    assert (reach[4]["verdict"], reach[4]["reachability"]) == ("failed", "unreachable")
    ports = f"TCP ports {FORWARDED} and {FORWARDED + 1} (the second for direct lines)"
    assert f"open {ports} of {closed_host} in the firewall" in reach[4]["fix"]

    assert found[5]["initial peer"]["found"].startswith("nothing listens on TCP port 9 of")
    assert nobody in found[5]["initial peer"]["fix"]
    assert "does not answer on TCP port" in found[6]["initial peer"]["found"]
    assert f"on {closed_host}, open TCP port {PORT}" in found[6]["initial peer"]["fix"]
    for result in found[5:]:
        assert result["initial peer"]["verdict"] == "failed"
        assert result["reachability"]["verdict"] == "warning", "nobody could be asked"
        assert HOME in result["reachability"]["fix"]

"""The doctor names what is wrong, and one fix with the user's own address in it."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import swarm as swarm_commands
from p2p_dtfm.core.protocol.invited.line import open_line
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.peers import doctor
from p2p_dtfm.daemon.peers.checks import this_machine
from p2p_dtfm.daemon.peers.checks.check import Check, Grade
from p2p_dtfm.daemon.peers.checks.kernel import MeasuredWay, check_kernel, ways_of
from p2p_dtfm.daemon.peers.checks.ports import check_ports
from p2p_dtfm.daemon.peers.checks.this_machine import check_devices, check_disk
from p2p_dtfm.daemon.peers.doctor import Examination, check_reachability
from p2p_dtfm.daemon.peers.facts.newcomer import Newcomer, within_limits
from p2p_dtfm.daemon.peers.facts.worth import Worth, ask_worth, words
from p2p_dtfm.daemon.peers.peer_check import Finding, check_initial_peer
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.local_swarm import LocalSwarm
from p2p_dtfm.train.model.kinds.registry import with_sizes
from tests.core.builders import device
from tests.e2e.helpers import DEADLINE_S, wait_until, write_endless_spec
from tests.e2e.test_bootstrap import bootstrap_node
from tests.e2e.walking_daemon import MODULE
from tests.forked import run_to_its_end

assert swarm_commands, "imported, it registers its commands"
SOMEBODY = "12D3KooWRbpEJ767DUrmMgm1PApxQQP6RGu8ZLY4XCYqd54AiwbL"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
SKEWED = """
import asyncio, pathlib, sys, time
import p2p_dtfm.net.hivemind_parts
import hivemind.dht.protocol
hivemind.dht.protocol.get_dht_time = lambda: time.time() + float(sys.argv[2])
from p2p_dtfm.daemon.peers.bootstrap_node import Bootstrap
node = Bootstrap(pathlib.Path(sys.argv[1]), ["/ip4/127.0.0.1/tcp/0"], as_json=True)
sys.exit(asyncio.run(node.run()))
"""


def ask_doctor(home: Path, *addresses: str, invite: str = "") -> tuple[int, dict[str, dict]]:
    """(exit code, findings by name) of the doctor."""
    arguments = ["doctor", "--json", "--home", str(home), "--listen", LOOPBACK]
    for address in addresses:
        arguments += ["--initial-peers", address]
    arguments += ["--invite", invite] if invite else []
    done = run_to_its_end(arguments, DEADLINE_S, {"P2P_DTFM_THREADS": "1"})
    assert "Traceback" not in done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] == (done.returncode == 0)
    return done.returncode, {check["name"]: check for check in result["checks"]}


def look_at(folder: Path, address: str) -> list[Finding]:
    """What the doctor finds on the way to one peer."""

    async def look() -> list[Finding]:
        host = await Host.start(folder / "doctor.key", [LOOPBACK])
        try:
            return await check_initial_peer(host, address)
        finally:
            await host.close()

    return asyncio.run(look())


@pytest.fixture(scope="module")
def node_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with bootstrap_node(tmp_path_factory.mktemp("doctor") / "bootstrap") as (_, address):
        yield address


def test_a_healthy_machine_and_a_bootstrap_node(node_address: str, tmp_path: Path) -> None:
    code, found = ask_doctor(tmp_path, node_address)
    assert code == 0
    assert found["initial peer"]["verdict"] == "ok"
    assert "a bootstrap node" in found["initial peer"]["found"]
    assert 0 < found["initial peer"]["connect_ms"] < 10_000
    assert found["clock"]["verdict"] == "ok"
    assert abs(found["clock"]["offset_ms"]) < 500
    assert found["device"]["block_ms"] > 0
    assert set(found["versions"]["versions"]) == {"p2p-dtfm", "python", "hivemind", "torch"}
    assert not (tmp_path / "identity.key").exists(), "it leaves nothing in the home"


def test_a_member_tells_what_it_trains_and_anybody_reads_what_it_can_do(tmp_path: Path) -> None:
    """A stranger sees device, links, run and plan in the directory, and what its own device would
    add."""
    spec = write_endless_spec(tmp_path)
    with LocalSwarm(tmp_path, ["--threads", "1"], MODULE) as swarm:
        founder, address = swarm.found(["--run", str(spec)])
        peer, clock = look_at(tmp_path, address)
        wait_until(lambda: published(address), "the founder publishes its part in the plan")
        told = published(address)
        worth = asyncio.run(worth_at(tmp_path, address))
        shown = CliRunner().invoke(app, ["peers", "--initial-peers", address])
    assert peer.verdict == clock.verdict == "ok"
    assert "trains test" in peer.found
    assert "data python-standard-library, licence PSF-2.0, source standard library" in peer.found
    assert told["run_digest"] == peer.facts["run_digest"]

    (member,) = told["members"]
    assert member["peer_id"] in address and member["device"]["kind"] == "cpu"
    assert member["device"]["facts"][3] > 0, "operations per second"
    assert told["plan"]["pipelines"] == [
        {"microbatches": 4, "stages": [{"peer_id": member["peer_id"], "layers": [*range(6)]}]}
    ]
    assert told["plan"]["tokens_per_s"] > 0 and told["silent"] == []
    assert worth is not None and (worth.members, worth.measured) == (1, 1)
    assert worth.after > worth.before > 0 and worth.layers
    assert "would add" in words(worth)
    assert shown.exit_code == 0 and "1 pipeline of 1 stage" in shown.output
    assert founder.home.exists()


def published(address: str) -> dict:
    """What `peers --initial-peers` says once a member is in a view; before that, nothing."""
    done = CliRunner().invoke(app, ["peers", "--initial-peers", address, "--json"])
    if done.exit_code or not (found := json.loads(done.stdout))["plan"]:
        time.sleep(1)
        return {}
    return found


async def worth_at(folder: Path, address: str) -> Worth | None:
    """What a machine a hundred times as fast as any would be worth."""
    host = await Host.start(folder / "fast.key", [LOOPBACK], (), [address])
    try:
        return await ask_worth(host, [address], Newcomer(lambda spec: device(speed=1000)))
    finally:
        await host.close()


def test_a_port_at_which_nobody_listens(tmp_path: Path) -> None:
    with closing(socket.socket()) as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{SOMEBODY}"
        code, found = ask_doctor(tmp_path, address)
    assert code == 6
    assert found["initial peer"]["found"] == f"nothing listens on TCP port {port} of 127.0.0.1"
    assert address in found["initial peer"]["fix"]
    assert "clock" not in found


def test_of_the_addresses_of_an_invitation_one_that_answers_is_enough(
    node_address: str, tmp_path: Path
) -> None:
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{SOMEBODY}"
    code, found = ask_doctor(tmp_path, invite=open_line("ab" * 32, [node_address, dead]).text())
    assert code == 0, found
    assert found["initial peer"]["verdict"] == "warning", "the last one; the first is well"
    assert "nothing listens on TCP port 1" in found["initial peer"]["found"]
    assert "another answers" in found["initial peer"]["found"]
    code, found = ask_doctor(tmp_path, invite=open_line("ab" * 32, [dead]).text())
    assert code == 6 and found["initial peer"]["verdict"] == "failed"


def test_another_program_listens_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (peer,) = look_at(tmp_path, f"/ip4/127.0.0.1/tcp/{port}/p2p/{SOMEBODY}")
    assert peer.verdict == "failed"
    assert "is open, and libp2p gets no answer" in peer.found


def test_another_peer_answers(node_address: str, tmp_path: Path) -> None:
    wrong = node_address.rsplit("/", 1)[0] + "/" + SOMEBODY
    (peer,) = look_at(tmp_path, wrong)
    assert peer.verdict == "failed"
    assert f"another peer than {SOMEBODY}" in peer.found


def test_a_mangled_address(tmp_path: Path) -> None:
    (peer,) = look_at(tmp_path, "127.0.0.1:4001")
    assert peer.verdict == "failed"
    assert "malformed address '127.0.0.1:4001'" in peer.found
    assert "/ip4/127.0.0.1/tcp/4001/p2p/" in peer.fix


@pytest.mark.parametrize(("ahead_s", "verdict"), [(30.0, "failed"), (-2.0, "warning")])
def test_a_wrong_clock(ahead_s: float, verdict: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SKEWED, str(tmp_path / "node"), str(ahead_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["addresses"][0]
        _, clock = look_at(tmp_path, address)
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
    assert clock.verdict == verdict
    assert abs(float(str(clock.facts["offset_ms"])) / 1e3 - ahead_s) < 0.5
    assert ("behind" if ahead_s > 0 else "ahead of") in clock.found
    assert "timedatectl" in clock.fix


def test_a_home_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = check_disk(tmp_path / "file" / "home")
    assert check.verdict is Grade.FAILED and str(tmp_path / "file") in check.found


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "DISK_NEEDED_BYTES", 1 << 60)
    check = check_disk(tmp_path / "not" / "yet" / "there")
    assert check.verdict is Grade.FAILED and "--home DIR" in check.fix


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}"
        assert next(check_ports([address], False)).verdict is Grade.FAILED
        assert next(check_ports([address], True)).verdict is Grade.OK
    assert next(check_ports([address], False)).verdict is Grade.OK
    assert next(check_ports([LOOPBACK], False)).verdict is Grade.OK
    assert next(check_ports(["127.0.0.1:80"], False)).verdict is Grade.FAILED


def test_the_port_above_is_looked_at_where_direct_lines_come_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        above = server.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{above - 1}"
        (check,) = check_ports([address], False, True)
        assert check.verdict is Grade.WARNING and f"{above}, where direct" in check.found
        assert f"sport = :{above}" in check.fix
        (check,) = check_ports([address], False, False)
        assert check.verdict is Grade.OK and str(above) not in check.found
    (check,) = check_ports([address], False, True)
    assert check.verdict is Grade.OK and f"so is {above}, for direct lines" in check.found


def test_a_check_for_each_of_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = with_sizes(read_run_spec("tiny"))
    two = list(check_devices("cpu, emulated:1,cpu", 3, spec))
    assert [check.verdict for check in two] == [Grade.OK, Grade.OK]
    nothing = subprocess.CompletedProcess((), 0, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: nothing)
    (all_of_them,) = check_devices("all", 1, spec)  # no accelerator: the processor
    assert all_of_them.verdict is Grade.OK
    (wrong,) = check_devices("cpu,gpu", 1, spec)
    assert wrong.verdict is Grade.FAILED and "no list of devices" in wrong.found


def kernel(folder: Path, receive: int, send: int, control: str, *others: str) -> Path:
    facts = {
        "tcp_rmem": f"4096 131072 {receive}",
        "tcp_wmem": f"4096 16384 {send}",
        "tcp_congestion_control": control,
        "tcp_available_congestion_control": " ".join((control, *others)),
    }
    for name, text in facts.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def test_what_the_kernel_lets_a_connection_carry(tmp_path: Path) -> None:
    usual = kernel(tmp_path, 6 << 20, 4 << 20, "cubic", "bbr")
    near, far = MeasuredWay(125_000_000, 0.0005), MeasuredWay(60_000_000, 0.15)
    check = check_kernel([near], usual)
    assert check.verdict is Grade.OK, "for short ways all is well"
    assert "cubic; a buffer of 4.00 MiB carries 168 Mbit/s over 100 ms" in check.found
    assert "tcp_congestion_control=bbr" in check.fix and "rmem" not in check.fix
    check = check_kernel([near, far], usual)
    assert check.verdict is Grade.WARNING and "480 Mbit/s over 150 ms" in check.found
    assert check.fix.startswith(
        "sudo sysctl -w net.ipv4.tcp_rmem='4096 131072 67108864' "
        "net.ipv4.tcp_wmem='4096 16384 67108864' net.ipv4.tcp_congestion_control=bbr"
    )
    check = check_kernel([], usual)
    assert check.verdict is Grade.OK and "for 1.00 Gbit/s, if your line has it" in check.found
    assert "'4096 131072 33554432'" in check.found
    check = check_kernel([far], kernel(tmp_path, 64 << 20, 64 << 20, "bbr"))
    assert check.verdict is Grade.OK and not check.fix
    (tmp_path / "tcp_wmem").unlink()
    assert check_kernel([far], tmp_path).verdict is Grade.SKIPPED


def test_the_ways_are_those_that_the_daemon_itself_has_measured() -> None:
    link = {"round_trip_ns": 20_000_000, "bytes_per_s": 1_000}
    members = [{"peer_id": "me", "links": {"b": link}}, {"peer_id": "b", "links": {"c": link}}]
    assert ways_of(members, "me") == [MeasuredWay(1_000, 0.02)]
    assert ways_of(members, "c") == [] and ways_of(None, None) == []


def seen_by(listen: str, announce: tuple[str, ...] = (), takes_lines: bool = True) -> Examination:
    spec = read_run_spec("tiny")
    newcomer = partial(within_limits, Settings(device="cpu", threads=1))
    return Examination(
        Path("/none"), (listen,), announce, (), "cpu", 1, spec, newcomer, takes_lines
    )


@pytest.mark.parametrize(
    ("address", "verdict", "word"),
    [
        ("/ip4/8.8.8.8/tcp/4001", Grade.OK, "public address 8.8.8.8"),
        ("/ip4/192.168.1.5/tcp/4001", Grade.WARNING, "router to 192.168.1.5"),
    ],
)
def test_reachability_as_far_as_it_can_be_told(address: str, verdict: Grade, word: str) -> None:
    check = check_reachability([f"{address}/p2p/{SOMEBODY}"], seen_by("/ip4/0.0.0.0/tcp/4001"))
    assert check.verdict is verdict
    assert word in check.found + check.fix
    assert verdict is Grade.OK or "TCP ports 4001 and 4002" in check.fix


def test_loopback_and_announced_addresses() -> None:
    check = check_reachability([f"{LOOPBACK}/p2p/{SOMEBODY}"], seen_by(LOOPBACK))
    assert check.verdict is Grade.WARNING and "no other machine" in check.found
    check = check_reachability([], seen_by("/ip4/0.0.0.0/tcp/1", ("/ip4/8.8.8.8/tcp/1",)))
    assert check.verdict is Grade.OK and "/ip4/8.8.8.8/tcp/1" in check.found


def test_exit_codes() -> None:
    fine = Check("disk", Grade.OK, "")
    lost = Check("initial peer", Grade.FAILED, "")
    assert doctor.exit_code([fine]) == 0
    assert doctor.exit_code([fine, lost]) == 6
    assert doctor.exit_code([lost, Check("disk", Grade.FAILED, "")]) == 2

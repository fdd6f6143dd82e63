"""p2pd is found by its addresses, its loss is told, and it is never left behind."""

import asyncio
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.net.contacts.addresses import parse_address
from p2p_dtfm.net.contacts.calling import FRESH_S
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.errors import Unreachable, nobody_listens
from p2p_dtfm.net.hivemind_parts import Multiaddr, PeerID
from p2p_dtfm.net.libp2p import around_hivemind
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import STREAMS_LIMIT_PER_PEER, Host
from tests.net.net_support import LOOPBACK, hosts, run


async def _echo(sender: str, body: bytes) -> bytes:
    return body


def test_addresses_can_be_pasted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            addresses = await one.addresses()
            assert addresses and all(parse_address(at)[0] == one.peer_id for at in addresses)
            assert one.peer_id in await two.connected_peers()

    run(scenario())


def test_a_host_has_as_many_descriptors_as_it_may(tmp_path: Path) -> None:
    """A hundred neighbours by direct lines take more than the 1,024 descriptors of most systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))

        async def scenario() -> None:
            async with hosts(tmp_path, 1):
                now_soft, now_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                bounds = [16_384] if hard == resource.RLIM_INFINITY else [16_384, hard]
                assert (now_soft, now_hard) == (min(bounds), hard)

        run(scenario())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_joiners_of_one_peer_reach_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 3) as (_, two, three):
            await ControlPlane(three, _echo).ready()
            caller = ControlPlane(two, _echo)
            two.know(three.peer_id, await three.addresses())
            assert await caller.call(three.peer_id, b"hi", 20.0) == b"hi"

    run(scenario())


def test_connect_to_nobody_is_unreachable_in_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 1) as (host,):
            other = Identity.load_or_create(tmp_path / "other").peer_id
            began = time.monotonic()
            with pytest.raises(Unreachable) as error:
                await host.connect(other, ["/ip4/127.0.0.1/tcp/1"], 5.0)
            assert error.value.peer_id == other and time.monotonic() - began < 6
            assert nobody_listens(error.value.cause)
            with pytest.raises(Unreachable) as again:  # p2pd waits before it dials again
                await host.connect(other, ["/ip4/127.0.0.1/tcp/1"], 5.0)
            assert again.value.cause == error.value.cause
            with pytest.raises(Unreachable):
                await host.connect("nonsense", ["/ip4/127.0.0.1/tcp/1"], 5.0)
            with pytest.raises(Unreachable):
                await host.connect(other, ["nonsense"], 5.0)

    run(scenario())


def test_whatever_hivemind_raises_of_an_address_is_no_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 1) as (host,):
            other = Identity.load_or_create(tmp_path / "other").peer_id
            bad = ["/ip4/203.0.113.7/tcp/0000019999999", "/dns4/a b/tcp/80"]
            for is_chosen in (False, True):
                with pytest.raises(Unreachable):
                    await host.connect(other, bad, 5.0, is_chosen)
            for error in (ValueError(""), KeyError("x"), TypeError(), struct.error()):

                async def connect(*arguments: object, error: Any = error) -> None:
                    raise error

                host.p2p._client.connect = connect
                with pytest.raises(Unreachable):
                    await host.connect(other, ["/ip4/127.0.0.1/tcp/1"], 5.0, is_chosen=True)

    run(scenario())


def test_a_far_end_of_a_kind_that_hivemind_does_not_know_hides_no_other(tmp_path: Path) -> None:
    """The connecting peer chooses the kind. Each look at the connections failed as long as this one
    lasted."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            infos = await one.p2p.list_peers()
            stranger = Identity.load_or_create(tmp_path / "other").peer_id
            of_another_kind = Multiaddr(b"\xc1\x03\x05hello")  # /sni/hello
            infos += (PeerInfo(PeerID.from_base58(stranger), [of_another_kind]),)

            async def list_peers() -> tuple[PeerInfo, ...]:
                return infos

            one.p2p.list_peers = list_peers
            assert await one.connected_peers() == tuple(sorted((two.peer_id, stranger)))
            assert await one.calling.is_linked(stranger)
            assert await one.calling.seen_hosts([stranger]) == [""]
            await asyncio.sleep(FRESH_S)
            assert await one.calling.seen_hosts([two.peer_id]) == ["127.0.0.1"]

    run(scenario())


def test_unreachable_initial_peer_names_each_address(tmp_path: Path) -> None:
    async def scenario() -> None:
        other = Identity.load_or_create(tmp_path / "other").peer_id
        with socket.socket() as silent:  # this end accepts connections and never says a word
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            tried = [
                f"/ip4/127.0.0.1/tcp/1/p2p/{other}",
                f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{other}",
            ]
            began = time.monotonic()
            with pytest.raises(UserError) as error:
                await Host.start(tmp_path / "own", LOOPBACK, initial_peers=tried)
            assert time.monotonic() - began < 15
        assert error.value.exit_code == 6
        assert all(address in error.value.cause for address in tried)
        assert len(error.value.fixes) == 3
        assert not [c for c in psutil.Process().children() if c.name() == "p2pd"]

    run(scenario())


def test_occupied_port_is_explained(tmp_path: Path) -> None:
    async def scenario() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(UserError, match=f"TCP port {port} is taken by python"):
                await Host.start(tmp_path / "own", [f"/ip4/127.0.0.1/tcp/{port}"])

    run(scenario())


def test_death_of_p2pd_is_told_and_fails_what_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            called = asyncio.Event()

            async def never(sender: str, body: bytes) -> bytes:
                called.set()
                await asyncio.Event().wait()
                return b""

            await ControlPlane(one, never).ready()
            call = asyncio.create_task(ControlPlane(two, _echo).call(one.peer_id, b"", 50.0))
            await asyncio.wait_for(called.wait(), 10)
            os.kill(two.p2pd_pid, signal.SIGKILL)
            await asyncio.wait_for(two.lost.wait(), 2)
            with pytest.raises(Unreachable):
                await asyncio.wait_for(call, 2)
            with pytest.raises(Unreachable):
                await two.connect(one.peer_id, [], 5.0)
            again = await Host.start(tmp_path / "1.key", LOOPBACK, [], await one.addresses())
            assert again.peer_id == two.peer_id
            await again.close()

    run(scenario())


PROGRAM = """
import asyncio, sys
from pathlib import Path
from p2p_dtfm.net.libp2p.host import STREAMS_LIMIT_PER_PEER, Host

async def main():
    host = await Host.start(Path(sys.argv[1]), ["/ip4/127.0.0.1/tcp/0"])
    print(host.p2pd_pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_p2pd_ends_with_its_killed_parent(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "key")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        p2pd = psutil.Process(int(parent.stdout.readline()))
        assert p2pd.name() == "p2pd"
        parent.kill()
        _wait_gone(p2pd, 2.0)
        assert parent.stderr.read() == "", "stderr is ours, and we had nothing to say"


def test_ctrl_c_in_the_terminal_leaves_p2pd_to_its_parent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 1) as (host,):
            assert os.getpgid(host.p2pd_pid) != os.getpgid(0), "the group that gets the signal"
            assert os.getsid(host.p2pd_pid) != os.getsid(0)

    run(scenario())


def test_one_peer_cannot_open_streams_without_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):

            async def hold(
                sender: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
            ) -> None:
                writer.write(b"!")
                await reader.read()

            await one.serve_streams("/test/hold", hold)
            writers, first_bytes = [], []
            for _ in range(STREAMS_LIMIT_PER_PEER + 3):
                reader, writer = await two.open_stream(one.peer_id, "/test/hold", 10)
                writers.append(writer)
                writer.write(b"?")
                try:
                    first_bytes.append(await asyncio.wait_for(reader.read(1), 10))
                except ConnectionResetError:  # what the test wrote to it is unread
                    first_bytes.append(b"")
            assert first_bytes == [b"!"] * STREAMS_LIMIT_PER_PEER + [b""] * 3
            for writer in writers:
                writer.close()

    run(scenario())


def test_an_answer_to_a_call_that_gave_up_does_not_end_the_reader(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 1) as (host,):
            pending = host.p2p._client.control._pending_calls
            pending["call"] = asyncio.get_running_loop().create_future()
            assert "call" in pending
            pending["call"].cancel()
            assert "call" not in pending, "hivemind would set its result"

    run(scenario())


def _wait_gone(process: psutil.Process, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "p2pd outlives its parent"
        time.sleep(0.01)


def test_only_provably_dead_sockets_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(around_hivemind, "_FOLDER", tmp_path)
    old = time.time() - 3600
    paths = [tmp_path / f"hivemind-p2p{name}-x.sock" for name in ("d", "client", "young")]
    bound = [socket.socket(socket.AF_UNIX) for _ in paths]
    for path, server in zip(paths, bound, strict=True):
        server.bind(str(path))
    other = tmp_path / "hivemind-other.sock"
    other.write_text("")
    bound[0].listen()  # this one is alive; the two others die
    bound[1].close()
    bound[2].close()
    for path in (paths[0], paths[1], other):
        os.utime(path, (old, old))
    assert around_hivemind.remove_stale_sockets() == 1
    assert paths[0].exists() and not paths[1].exists() and paths[2].exists() and other.exists()
    bound[0].close()


@pytest.mark.parametrize("name", [b"\0p2p-dtfm-test-\xff\xfe", b"\0p2p-dtfm-test-\n\n"])
def test_no_name_of_another_programs_socket_keeps_a_peer_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    """The kernel's list has names as they are: any bytes, and any program of any user binds some.
    What was no UTF-8, or an empty line, ended each daemon of the machine at its start."""
    monkeypatch.setattr(around_hivemind, "_FOLDER", tmp_path)
    path = tmp_path / "hivemind-p2pd-x.sock"
    with socket.socket(socket.AF_UNIX) as of_another, socket.socket(socket.AF_UNIX) as dead:
        of_another.bind(name)
        dead.bind(str(path))
        os.utime(path, (0, 0))
        assert around_hivemind.remove_stale_sockets() == 0, "it is bound"
        dead.close()
        assert around_hivemind.remove_stale_sockets() == 1

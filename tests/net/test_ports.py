"""A port has one daemon. A second daemon is refused before its p2pd starts, and told whose the port
is."""

import asyncio
import socket
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.net.contacts.ports import refuse_taken_ports
from p2p_dtfm.net.libp2p.host import Host
from tests.net.net_support import run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_port_of_another_home_is_refused_and_its_home_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        listen = [f"/ip4/127.0.0.1/tcp/{free_port()}"]
        first = await Host.start(tmp_path / "the first" / "identity.key", listen)
        try:
            everywhere = [listen[0].replace("127.0.0.1", "0.0.0.0")]
            for wanted in (listen, everywhere):
                with pytest.raises(UserError) as error:
                    await Host.start(tmp_path / "second" / "identity.key", wanted)
                assert f"is taken by the daemon of {tmp_path / 'the first'} (process" in str(
                    error.value
                )
                assert error.value.exit_code == 2 and len(error.value.fixes) == 3
                assert f"p2p-dtfm status --home '{tmp_path / 'the first'}'" in error.value.fixes[0]
        finally:
            await first.close()
        again = await Host.start(tmp_path / "second" / "identity.key", listen)
        await again.close()

    run(scenario())


def test_a_port_that_becomes_free_in_a_moment_is_waited_for() -> None:
    async def scenario() -> None:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            address = f"/ip4/127.0.0.1/tcp/{holder.getsockname()[1]}"
            asyncio.get_running_loop().call_later(0.3, holder.close)
            await refuse_taken_ports([address], patience_s=5.0)

    run(scenario())


def test_connections_that_have_ended_hold_no_port() -> None:
    """A daemon that comes back at once finds the connections of its former life in TIME_WAIT."""

    async def scenario() -> None:
        with socket.socket() as listener, socket.socket() as caller:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            caller.connect(("127.0.0.1", port))
            answered, _ = listener.accept()
            answered.close()  # the end that closes first keeps it
            caller.recv(1)
        await refuse_taken_ports([f"/ip4/127.0.0.1/tcp/{port}"], patience_s=0.0)

    run(scenario())


@pytest.mark.parametrize(
    "address",
    ["/ip4/127.0.0.1/tcp/0", "/dns4/example.org/tcp/4001", "/ip4/203.0.113.7/tcp/4001"],
)
def test_what_cannot_be_tried_is_left_to_p2pd(address: str) -> None:
    run(refuse_taken_ports([address], patience_s=0.0))

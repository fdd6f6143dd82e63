"""A peer as a process of its own, to be put into a namespace: does what its standard input says.

Each line of input is a JSON list, a command and its arguments; each is answered with one line.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from p2p_dtfm.net import event_loop
from p2p_dtfm.net.contacts.addresses import host_and_port
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p import host as host_module
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.nat.dial_back import CallBacks, SeenAddress
from p2p_dtfm.net.nat.punching import Punching
from p2p_dtfm.net.nat.relay import Relay, reserve
from p2p_dtfm.net.streams.probing import Probes


async def main() -> None:
    extra = json.loads(sys.argv[1])
    listen = sys.argv[2:] or ["/ip4/0.0.0.0/tcp/0"]
    plain = host_module.flags_of
    host_module.flags_of = lambda *a: [*plain(*a), *extra]  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        host = await Host.start(Path(folder) / "identity.key", listen)
        probes = await Probes(host).ready()
        relay = Relay(host)
        callbacks = await CallBacks(host).ready()
        seen: list[SeenAddress] = []
        port = host_and_port((await host.addresses())[0])[1]
        punching = await Punching(
            host,
            lambda: (seen[-1].host, seen[-1].port) if seen else None,
            lambda: bool(seen and seen[-1].open_ports),
            lambda: port,
        ).ready()

        async def look(peer_id: str) -> SeenAddress:
            seen.append(await callbacks.ask(peer_id, (port,)))
            return seen[-1]

        print(json.dumps([host.peer_id, await host.addresses()]), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, *arguments = json.loads(line)
            try:
                answer: Any = {"ok": await do(host, probes, relay, look, punching, name, arguments)}
            except (Unreachable, Refused) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
        with contextlib.suppress(Unreachable):
            await host.close()


async def do(
    host: Host,
    probes: Probes,
    relay: Relay,
    look: Callable[[str], Awaitable[SeenAddress]],
    punching: Punching,
    name: str,
    arguments: list[Any],
) -> Any:
    if name == "connect":
        await host.connect(arguments[0], [arguments[1]], arguments[2] if arguments[2:] else 10.0)
    elif name == "round_trip":
        return await probes.probe_round_trip(arguments[0])
    elif name == "bandwidth":
        return await probes.probe_bandwidth(arguments[0])
    elif name == "list":
        return await host.remote_addresses()
    elif name == "look":
        return msgspec.to_builtins(await look(arguments[0]))
    elif name == "disconnect":
        await host.disconnect(arguments[0])
    elif name == "serve_relay":
        await relay.ready()
    elif name == "reserve":
        return await reserve(host, arguments[0])
    elif name == "punch":
        return await punching.punch(arguments[0], tuple(arguments[1:]))
    elif name == "addresses":
        return await host.addresses()
    else:
        raise AssertionError(name)


if __name__ == "__main__":
    event_loop.run(main())

"""Measuring the way to another peer: its round trip, and the bytes per second it takes."""

import asyncio
import contextlib
import statistics
import struct
from collections.abc import Callable

from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import CONNECTION_ERRORS
from p2p_dtfm.net.libp2p.port import HostPort, Writer
from p2p_dtfm.ports import now

CALL_DEADLINE_S = 10.0
BANDWIDTH_DEADLINE_S = 10.0
FIRST_PROBE_BYTES = 1 << 20
LARGEST_PROBE_BYTES = 8 << 20
LONG_ENOUGH_S = 0.05
_SHORTEST_SPAN_S = 0.005
_GROWTH = 4
PROBE_PROTOCOL = "/p2p-dtfm/1/bandwidth"
_REPORT_BYTES = 1 << 16
_SERVED_BYTES_LIMIT = 32 << 20
_SERVED_SECONDS_LIMIT = 12.0
_SILENT_SECONDS_LIMIT = 2.5
"""How long a prober may send nothing before it makes room for others."""
_LONG_SECONDS = 2.0
_PEERS_REMEMBERED = 1024
_COUNT = struct.Struct(">Q")
_BUSY = (1 << 64) - 1
_ZEROS = bytes(_REPORT_BYTES)


class Probes:
    """Probes other peers, one at a time, and serves their probes, one at a time.

    A probed peer reports how many bytes have arrived, after each 64 KiB. So a slow link yields a
    figure too when the time is over. `await ready()` before others may probe.
    """

    def __init__(self, host: HostPort) -> None:
        self._host = host
        self._echo = ControlPlane(host, self._answer, name="echo")
        self._probing = asyncio.Lock()
        self._serving = False
        self._not_before_s: dict[str, float] = {}
        self.said: Callable[[], bytes] = lambda: b""
        """Makes the answer to a probe of the round trip."""
        self.hear: Callable[[str, bytes, int], None] = lambda peer_id, answer, round_trip_ns: None
        """Told what a probed peer has answered, and after how many nanoseconds."""

    async def ready(self) -> "Probes":
        """Start to serve."""
        await self._echo.ready()
        await self._host.serve_streams(PROBE_PROTOCOL, self._serve, "bandwidth")
        return self

    async def probe_round_trip(self, peer_id: str) -> int:
        """Nanoseconds: the median of five small calls on a warm connection.

        Raises `Unreachable` or `Refused`.
        """
        async with self._probing:
            answer = await self._echo.call(peer_id, b"", CALL_DEADLINE_S)  # opens the connection
            took_ns = int(statistics.median([await self._one_call(peer_id) for _ in range(5)]))
        self.hear(peer_id, answer, took_ns)
        return took_ns

    async def ask_once(self, peer_id: str) -> int:
        """Nanoseconds of a single call, on a connection that is there. It is less sure, and cheap.

        Raises `Unreachable` or `Refused`.
        """
        began = now.monotonic_ns()
        answer = await self._echo.call(peer_id, b"", CALL_DEADLINE_S)
        took_ns = now.monotonic_ns() - began
        self.hear(peer_id, answer, took_ns)
        return took_ns

    async def probe_bandwidth(
        self,
        peer_id: str,
        first_bytes: int = FIRST_PROBE_BYTES,
        deadline_s: float = BANDWIDTH_DEADLINE_S,
    ) -> int:
        """Bytes per second outward. Sends `first_bytes`, and then four times as many, until a probe
        takes 50 ms or has 8 MiB. Raises `Unreachable`, or `Refused` where the peer is busy."""
        async with self._probing:
            reader, writer = await self._host.open_stream(peer_id, PROBE_PROTOCOL, CALL_DEADLINE_S)
            try:
                await self._expect_welcome(peer_id, reader, writer)
                return await _measure(peer_id, reader, writer, first_bytes, deadline_s)
            except (TimeoutError, *CONNECTION_ERRORS) as error:
                raise Unreachable(peer_id, "the bandwidth probe broke off") from error
            finally:
                writer.close()

    async def _one_call(self, peer_id: str) -> int:
        began = now.monotonic_ns()
        await self._echo.call(peer_id, b"", CALL_DEADLINE_S)
        return now.monotonic_ns() - began

    async def _answer(self, sender: str, body: bytes) -> bytes:
        return self.said()

    async def _expect_welcome(
        self, peer_id: str, reader: asyncio.StreamReader, writer: Writer
    ) -> None:
        writer.write(b"?")  # a stream begins to exist with its first byte
        async with asyncio.timeout(CALL_DEADLINE_S):
            (verdict,) = _COUNT.unpack(await reader.readexactly(_COUNT.size))
        if verdict == _BUSY:
            raise Refused("busy with the probe of another peer", peer_id)

    async def _serve(self, sender: str, reader: asyncio.StreamReader, writer: Writer) -> None:
        with contextlib.suppress(TimeoutError, *CONNECTION_ERRORS):
            async with asyncio.timeout(_SERVED_SECONDS_LIMIT):
                await reader.readexactly(1)
                if self._serving or self._waits_for_its_turn(sender):
                    writer.write(_COUNT.pack(_BUSY))
                    await reader.read(1)  # closing first would lose the answer
                    return
                self._serving = True
                began_s = now.monotonic_s()
                try:
                    await _count_bytes(reader, writer)
                finally:
                    self._serving = False
                    self._remember(sender, now.monotonic_s() - began_s)

    def _waits_for_its_turn(self, sender: str) -> bool:
        """Whether the sender must leave the line to others: for three times as long as it used the
        line."""
        return self._not_before_s.get(sender, 0.0) > now.monotonic_s()

    def _remember(self, sender: str, used_s: float) -> None:
        self._not_before_s.pop(sender, None)
        if used_s > _LONG_SECONDS:
            self._not_before_s[sender] = now.monotonic_s() + 3 * used_s
        while len(self._not_before_s) > _PEERS_REMEMBERED:
            del self._not_before_s[next(iter(self._not_before_s))]


async def _count_bytes(reader: asyncio.StreamReader, writer: Writer) -> None:
    """Report the bytes that arrived, at each multiple of 64 KiB, until the prober closes."""
    writer.write(_COUNT.pack(0))
    arrived = reported = 0
    while arrived < _SERVED_BYTES_LIMIT:
        async with asyncio.timeout(_SILENT_SECONDS_LIMIT):
            data = await reader.read(_REPORT_BYTES)
        if not data:
            return
        arrived += len(data)
        if arrived - reported >= _REPORT_BYTES:
            reported = arrived - arrived % _REPORT_BYTES
            writer.write(_COUNT.pack(reported))
            await writer.drain()


async def _measure(
    peer_id: str,
    reader: asyncio.StreamReader,
    writer: Writer,
    first_bytes: int,
    deadline_s: float,
) -> int:
    started = now.monotonic_s()
    before, size = 0, first_bytes
    while True:
        left_s = deadline_s - (now.monotonic_s() - started)
        size -= size % _REPORT_BYTES
        counted, elapsed_s, arrived = await _send_and_count(reader, writer, before, size, left_s)
        if arrived < _REPORT_BYTES:
            raise Unreachable(peer_id, f"less than 64 KiB arrived within {deadline_s:g} s")
        over = arrived < size or now.monotonic_s() - started >= deadline_s
        long_enough = counted < arrived and elapsed_s >= LONG_ENOUGH_S
        if over or long_enough or size * _GROWTH > LARGEST_PROBE_BYTES * 2:
            return max(1, int(counted / elapsed_s))
        before, size = before + size, min(size * _GROWTH, LARGEST_PROBE_BYTES)


async def _send_and_count(
    reader: asyncio.StreamReader,
    writer: Writer,
    before: int,
    size: int,
    deadline_s: float,
) -> tuple[int, float, int]:
    """(bytes between two reports, seconds between them, bytes that arrived in all).

    Measures from the first report to the last. Both came back the same way, so the round trip does
    not count, which on a long link takes longer than the bytes do. Where all reports came at once,
    measures from the first write on.
    """
    began = now.monotonic_s()
    arrived = first_count = 0
    first_report = last_report = began

    async def write() -> None:
        for _ in range(size // _REPORT_BYTES):
            writer.write(_ZEROS)
            await writer.drain()

    writing = asyncio.create_task(write())
    try:
        async with asyncio.timeout(max(deadline_s, 0.1)):
            while arrived < size:
                (count,) = _COUNT.unpack(await reader.readexactly(_COUNT.size))
                arrived, last_report = min(count - before, size), now.monotonic_s()
                if first_report == began:
                    first_count, first_report = arrived, last_report
    except TimeoutError:
        pass
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    between_s = last_report - first_report
    if arrived == first_count or between_s < _SHORTEST_SPAN_S:
        return arrived, max(last_report - began, 1e-9), arrived
    return arrived - first_count, between_s, arrived


async def probe_round_trip(probes: Probes, peer_id: str) -> int:
    """See `Probes.probe_round_trip`."""
    return await probes.probe_round_trip(peer_id)


async def probe_bandwidth(probes: Probes, peer_id: str) -> int:
    """See `Probes.probe_bandwidth`."""
    return await probes.probe_bandwidth(peer_id)

"""Link use: how much of a long, fast link the bulk plane fills, and whether shaped links equal it.

    python -m benchmarks.links --wanem PATH/wanem.c [--quick] [--json]
    python -m benchmarks.links --loopback [--quick] [--json]

A real network: `wanem` (one C file; also by the variable BENCHMARK_WANEM) carries packets between
two network namespaces with the link's latency and rate. It needs root, /dev/net/tun, gcc and ip;
where one is missing, this says so and ends with code 0. The transfer that counts takes a minute
from its first byte on, over lines that were open before as those of daemons are; it is made three
times, each with connections of its own, and the median counts. Another then runs on loopback over
shaped links with the same figures. Lower bound beside each figure: the link's own rate; and what a
plain TCP connection carries over the same network, from its first byte on too, in the same run.
Frames go by direct lines, but over shaped links, which are held to in libp2p's streams. With
`--loopback` there is no network: what one lane carries here at most and what each gigabyte costs,
both ends and their p2pd together, by a direct line and through libp2p. With
`--json` each transfer also says what it carried in every two seconds from its beginning.
"""

import argparse
import asyncio
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.wide_area import Missing, tell_skipped, wide_area
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.direct.lines import DirectLines
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.shaping import Shape, ShapedLink, ShapedPeer, Shaper
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.bulk_settings import STRIPES_LIMIT, BulkLimits, BulkListeners
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind

ONE_WAY_MS = 50.0
RATE_MBPS = 1000.0
LINK_BYTES_PER_S = RATE_MBPS * 1e6 / 8
TARGET = 0.95
FIRST_S, THEN_S = 10.0, 50.0
SHAPED_TIMES = ["--warm-s", "15", "--measured-s", "10"]
LOOPBACK_BYTES_PER_S = 1.2e9
LOOPBACK_S_PER_GB = 1.6
FRAME_BYTES = 4 << 20
MTU = 9000
RUN_DIGEST = "00" * 32
START_S = 30.0
SENDERS = 4
REPEATS = 3
SPAN_S = 2.0
TCP_PORT = 4701
ADDRESS = "10.77.0.{}"


# one end, as a process ----------------------------------------------------------------------------


def _header(index: int, size_bytes: int = FRAME_BYTES) -> FrameHeader:
    shape = (size_bytes // 4,)
    return FrameHeader(1, "00", 0, FrameKind.ACTIVATION, index, 0, "fp32", "float32", shape)


async def _start_host(folder: Path, ip: str, shape: str, initial: tuple[str, ...] = ()) -> Host:
    host = await Host.start(
        folder / "identity.key", [f"/ip4/{ip}/tcp/0"], initial_peers=list(initial)
    )
    if shape:
        host.shaper = Shaper(Shape.load(Path(shape)), host.peer_id)
    return host


def _complain(sender: str, fault: PeerFault) -> None:
    print(f"fault: {fault}", file=sys.stderr)


def _lines(host: Host, ip: str, direct: bool) -> DirectLines | None:
    return DirectLines(host, RUN_DIGEST, [f"/ip4/{ip}/tcp/0"]) if direct else None


async def _receive(folder: Path, ip: str, shape: str, direct: bool) -> None:
    host = await _start_host(folder, ip, shape)
    listeners = BulkListeners(lambda *frame: None, _complain)
    plane = BulkPlane(host, RUN_DIGEST, listeners, lines=_lines(host, ip, direct))
    await plane.ready()
    print((await host.addresses())[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await plane.close()
    await host.close()


async def _send(
    folder: Path,
    ip: str,
    shape: str,
    direct: bool,
    to: str,
    stripes: int,
    warm_s: float,
    measured_s: float,
) -> None:
    host = await _start_host(folder, ip, shape, (to,))
    peer_id = to.rsplit("/", 1)[1]
    listeners = BulkListeners(lambda *frame: None, _complain)
    limits = BulkLimits(most_stripes=stripes)
    plane = BulkPlane(host, RUN_DIGEST, listeners, limits, _lines(host, ip, direct))
    await plane.ready()
    payload, sent = bytes(FRAME_BYTES), 0
    computed_before = processor_s(os.getpid())

    async def flood(seconds: float) -> None:
        end_s = time.monotonic() + seconds

        async def give() -> None:  # as a step engine does: several tensors are ready at once
            nonlocal sent
            while time.monotonic() < end_s:
                sent += FRAME_BYTES
                await plane.send(peer_id, "reduce", _header(sent // FRAME_BYTES), payload)

        await asyncio.gather(*(give() for _ in range(SENDERS)))

    def accepted() -> int:
        return sent - plane.unacknowledged_bytes(peer_id, "reduce")

    if direct and not shape:  # a daemon's calls have gone over them before its first step
        async with asyncio.timeout(START_S):
            while not plane.is_direct(peer_id, "reduce"):
                await plane.send(peer_id, "reduce", _header(0, 1024), payload[:1024])
                await asyncio.sleep(0.1)
    spans: list[int] = []
    watching = asyncio.create_task(_watch(accepted, spans))
    first_s = time.monotonic()
    await flood(warm_s)
    before, began_s = accepted(), time.monotonic()
    first_rate = before / (began_s - first_s)
    await flood(measured_s)
    ended_s = time.monotonic()
    rate = (accepted() - before) / (ended_s - began_s)
    watching.cancel()
    await plane.flush(peer_id, "reduce")
    began_s = time.monotonic()
    burst = 8
    sends = [plane.send(peer_id, "reduce", _header(index), payload) for index in range(burst)]
    await asyncio.gather(*sends)
    await plane.flush(peer_id, "reduce")
    result = {
        "bytes_per_s": round(rate),
        "first_bytes_per_s": round(first_rate),
        "all_bytes_per_s": round(accepted() / (ended_s - first_s)),
        "each_2_s_bytes_per_s": spans,
        "stripes": plane.stripe_count(peer_id, "reduce"),
        "direct": plane.is_direct(peer_id, "reduce"),
        "burst_s": round(time.monotonic() - began_s, 3),
        "burst_bytes": burst * FRAME_BYTES,
        "estimate_bytes_per_s": plane.link_estimate(peer_id),
        "all_bytes": sent + burst * FRAME_BYTES,
        "sender_s": _less(processor_s(os.getpid()), computed_before),
    }
    print(json.dumps(result), flush=True)
    await plane.close()
    await host.close()


async def _watch(accepted: Callable[[], int], rates: list[int]) -> None:
    """Bytes/s that were accepted in each `SPAN_S`, until cancelled."""
    before, since_s = accepted(), time.monotonic()
    while True:
        await asyncio.sleep(SPAN_S)
        now, now_s = accepted(), time.monotonic()
        rates.append(round((now - before) / (now_s - since_s)))
        before, since_s = now, now_s


def processor_s(pid: int) -> dict[str, float]:
    """Processor time so far of a process and of its p2pd."""
    process = psutil.Process(pid)
    families = {"python": [process], "p2pd": process.children(recursive=True)}
    return {
        kind: sum(each.cpu_times().user + each.cpu_times().system for each in members)
        for kind, members in families.items()
    }


def _less(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {kind: now[kind] - before[kind] for kind in now}


def _receive_tcp(ip: str) -> None:
    with socket.create_server((ip, TCP_PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        buffer = bytearray(1 << 20)
        with connection:
            while connection.recv_into(buffer):
                pass


def _send_tcp(to: str, warm_s: float, measured_s: float) -> None:
    """Bytes acknowledged within the measured time; a socket buffers half a second of it."""
    with socket.create_connection((to, TCP_PORT)) as connection:
        piece, sent, first_s = bytes(1 << 20), 0, time.monotonic()
        rates = []
        for seconds in (warm_s, measured_s):
            before, began_s = sent - _unacknowledged_bytes(connection), time.monotonic()
            while time.monotonic() - began_s < seconds:
                connection.sendall(piece)
                sent += len(piece)
            accepted = sent - _unacknowledged_bytes(connection)
            rates.append(round((accepted - before) / (time.monotonic() - began_s)))
        all_rate = round(accepted / (time.monotonic() - first_s))
    names = ("first_bytes_per_s", "bytes_per_s", "all_bytes_per_s", "stripes")
    print(json.dumps(dict(zip(names, (*rates, all_rate, 1), strict=True))), flush=True)


def _unacknowledged_bytes(connection: socket.socket) -> int:
    answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
    count: int = struct.unpack("i", answer)[0]
    return count


# both ends, from outside -------------------------------------------------------------------------


def _role(namespace: str, *arguments: str) -> subprocess.Popen[str]:
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "benchmarks.links", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit("an end of the transfer ended early; see above")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _transfer(
    folder: Path, namespaces: tuple[str, str], ips: tuple[str, str], *more: str
) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    homes = [folder / "sender", folder / "receiver"]
    for home in homes:
        home.mkdir(exist_ok=True)
    receiver = _role(
        namespaces[1], "--role", "receive", "--home", str(homes[1]), "--ip", ips[1], *more
    )
    try:
        to = _line_of(receiver)
        before = processor_s(receiver.pid)  # `ip netns exec` has become the program itself
        arguments = ["--role", "send", "--home", str(homes[0]), "--ip", ips[0], "--to", to, *more]
        sender = _role(namespaces[0], *arguments)
        try:
            result: dict[str, Any] = json.loads(_line_of(sender))
            result["receiver_s"] = _less(processor_s(receiver.pid), before)
        finally:
            _end(sender)
    finally:
        _end(receiver)
    return result


def _transfer_tcp(times: list[str]) -> dict[str, Any]:
    receiver = _role("wan1", "--role", "receive-tcp", "--ip", ADDRESS.format(2))
    try:
        _line_of(receiver)
        sender = _role("wan0", "--role", "send-tcp", "--to", ADDRESS.format(2), *times)
        try:
            result: dict[str, Any] = json.loads(_line_of(sender))
        finally:
            _end(sender)
    finally:
        _end(receiver)
    return result


def _shape_file(folder: Path) -> Path:
    ids = []
    for name in ("sender", "receiver"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        ids.append(Identity.load_or_create(folder / name / "identity.key").peer_id)
    latency_ns, rate = int(ONE_WAY_MS * 1e6), int(LINK_BYTES_PER_S)
    shape = Shape(
        "links",
        (ShapedPeer("sender", ids[0]), ShapedPeer("receiver", ids[1])),
        tuple(ShapedLink(*way, latency_ns, rate) for way in (ids, ids[::-1])),
    )
    return shape.save(folder / "shape.json")


def _median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The middle run (of two the slower), with the rates of all."""
    runs = sorted(runs, key=lambda run: run["all_bytes_per_s"])
    rates = [run["all_bytes_per_s"] for run in runs]
    return {**runs[(len(runs) - 1) // 2], "runs_bytes_per_s": rates}


def measure(source: Path | None, quick: bool, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """A row for each kind of transfer. Raises `Missing`."""
    first_s, then_s = (5.0, 2.0) if quick else (FIRST_S, THEN_S)
    times = ["--warm-s", f"{first_s:g}", "--measured-s", f"{then_s:g}"]
    rows = []
    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-links-") as name:
        folder = Path(name)
        ips, namespaces = (ADDRESS.format(1), ADDRESS.format(2)), ("wan0", "wan1")
        way = f"{ONE_WAY_MS} {RATE_MBPS}"
        with wide_area(source, folder, f"2\n0 1 {way}\n1 0 {way}\n", 2, MTU):
            rows.append({"transfer": "TCP, wanem", **_transfer_tcp(times)})
            more = (*times, "--stripes", str(STRIPES_LIMIT))
            runs = [
                _transfer(folder / f"wanem-{number}", namespaces, ips, *more)
                for number in range(1 if quick else repeats)
            ]
            rows.append({"transfer": f"bulk, at most {STRIPES_LIMIT}, wanem", **_median_of(runs)})
        shaped = folder / "shaped"
        times = ["--warm-s", "5", "--measured-s", "2"] if quick else SHAPED_TIMES
        more = (*times, "--stripes", str(STRIPES_LIMIT), "--shape", str(_shape_file(shaped)))
        loopback = ("127.0.0.1", "127.0.0.1")
        result = _transfer(shaped, ("", ""), loopback, *more)
        rows.append({"transfer": f"bulk, at most {STRIPES_LIMIT}, shaped links", **result})
    return rows


def measure_loopback(quick: bool) -> list[dict[str, Any]]:
    """What one lane carries on this machine, directly and through libp2p."""
    loopback, times = ("127.0.0.1", "127.0.0.1"), ["--warm-s", "2"]
    times += ["--measured-s", "3" if quick else "10"]
    rows = []
    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-links-") as name:
        for way, more in (("direct line", ()), ("libp2p", ("--no-direct-lines",))):
            result = _transfer(Path(name) / way[0], ("", ""), loopback, *times, *more)
            rows.append({"transfer": f"one lane, {way}, loopback", **result})
    return rows


def report_loopback(rows: list[dict[str, Any]], as_json: bool) -> int:
    """Print; 0 if the targets are met."""
    for row in rows:
        row["processor_s_per_gb"] = _processor_s_per_gb(row)
    direct = rows[0]
    met = (
        direct["direct"]
        and direct["bytes_per_s"] >= LOOPBACK_BYTES_PER_S
        and direct["processor_s_per_gb"] <= LOOPBACK_S_PER_GB
    )
    if as_json:
        targets = {"bytes_per_s": LOOPBACK_BYTES_PER_S, "processor_s_per_gb": LOOPBACK_S_PER_GB}
        print(json.dumps({"transfers": rows, "target": targets, "met": met}))
        return 0 if met else 1
    for row in rows:
        print(
            f"{row['transfer']:32s} {row['bytes_per_s'] / 1e6:7.0f} MB/s "
            f"{row['processor_s_per_gb']:6.2f} s of processor for each GB"
        )
    print(
        f"target {LOOPBACK_BYTES_PER_S / 1e6:.0f} MB/s and {LOOPBACK_S_PER_GB:g} s: "
        f"{'met' if met else 'MISSED'}"
    )
    return 0 if met else 1


def _processor_s_per_gb(row: dict[str, Any]) -> float:
    parts = [*row["sender_s"].values(), *row["receiver_s"].values()]
    return round(sum(parts) / row["all_bytes"] * 1e9, 2)


def report(rows: list[dict[str, Any]], as_json: bool) -> int:
    """Print; 0 if the target is met."""
    for row in rows:
        is_shaped = "shaped" in row["transfer"]  # in libp2p's streams, which need time to grow
        rate = row["bytes_per_s"] if is_shaped else row["all_bytes_per_s"]
        row["link_use"] = round(rate / LINK_BYTES_PER_S, 3)
        row["first_link_use"] = round(row["first_bytes_per_s"] / LINK_BYTES_PER_S, 3)
        row["over_tcp"] = round(rate / rows[0]["all_bytes_per_s"], 3)
        if "all_bytes" in row:
            row["processor_s_per_gb"] = _processor_s_per_gb(row)
        if "burst_s" in row:
            ideal_s = row["burst_bytes"] / LINK_BYTES_PER_S + 2 * ONE_WAY_MS / 1000
            row["burst_over_ideal"] = round(row["burst_s"] / ideal_s, 2)
    by_name = {row["transfer"]: row for row in rows}
    use = by_name[f"bulk, at most {STRIPES_LIMIT}, wanem"]["link_use"]
    shaped = by_name[f"bulk, at most {STRIPES_LIMIT}, shaped links"]["link_use"]
    met = use >= TARGET
    if as_json:
        figures = {
            "link": {"round_trip_ms": 2 * ONE_WAY_MS, "bytes_per_s": LINK_BYTES_PER_S},
            "transfers": rows,
            "link_use": use,
            "target": TARGET,
            "met": met,
            "shaped_over_real": round(shaped / use, 3),
        }
        print(json.dumps(figures))
        return 0 if met else 1
    print(f"{RATE_MBPS:g} Mbit/s, {2 * ONE_WAY_MS:g} ms round trip; bound: 125.0 MB/s")
    print(
        f"{'transfer':32s} {'streams':>7s} {'MB/s':>7s} {'first 10 s':>10s} {'of link':>8s} "
        f"{'of TCP':>7s} "
        f"{'32 MiB / ideal':>15s} {'processor s / GB':>17s}"
    )
    for row in rows:
        burst = f"{row['burst_over_ideal']:.2f}" if "burst_s" in row else ""
        print(
            f"{row['transfer']:32s} {row['stripes']:7d} "
            f"{row['link_use'] * LINK_BYTES_PER_S / 1e6:7.1f} {row['first_link_use']:10.1%} "
            f"{row['link_use']:8.1%} {row['over_tcp']:7.1%} {burst:>15s} "
            f"{row.get('processor_s_per_gb', ''):>17}"
        )
        if len(runs := row.get("runs_bytes_per_s", [])) > 1:
            shares = ", ".join(f"{rate / LINK_BYTES_PER_S:.1%}" for rate in runs)
            print(f"{'':32s} the median of {shares}")
    verdict = "met" if met else "MISSED"
    print(f"link use {use:.1%}, target {TARGET:.0%}: {verdict}")
    print(f"shaped links carry {shaped / use:.2f} times what the real network did")
    return 0 if met else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    wanem = os.environ.get("BENCHMARK_WANEM")
    parser.add_argument("--wanem", type=Path, default=Path(wanem) if wanem else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of the transfer that counts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--loopback", action="store_true", help="one lane without a network")
    parser.add_argument("--no-direct-lines", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, default=Path(), help=argparse.SUPPRESS)
    parser.add_argument("--ip", default="", help=argparse.SUPPRESS)
    parser.add_argument("--to", default="", help=argparse.SUPPRESS)
    parser.add_argument("--shape", default="", help=argparse.SUPPRESS)
    parser.add_argument("--stripes", type=int, default=STRIPES_LIMIT, help=argparse.SUPPRESS)
    parser.add_argument("--warm-s", type=float, default=5.0, help=argparse.SUPPRESS)
    parser.add_argument("--measured-s", type=float, default=3.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "receive":
        direct = not options.no_direct_lines
        asyncio.run(_receive(options.home, options.ip, options.shape, direct))
    elif options.role == "send":
        work = _send(
            options.home,
            options.ip,
            options.shape,
            not options.no_direct_lines,
            options.to,
            options.stripes,
            options.warm_s,
            options.measured_s,
        )
        asyncio.run(work)
    elif options.role == "receive-tcp":
        _receive_tcp(options.ip)
    elif options.role == "send-tcp":
        _send_tcp(options.to, options.warm_s, options.measured_s)
    elif options.loopback:
        return report_loopback(measure_loopback(options.quick), options.json)
    else:
        try:
            rows = measure(options.wanem, options.quick, options.repeats)
        except Missing as missing:
            return tell_skipped(missing, options.json)
        return report(rows, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

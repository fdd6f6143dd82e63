"""Reduction: 64 MiB of gradients among four peers on loopback, against hivemind's and Gloo's.

    python -m benchmarks.reduction [--quick] [--json]

Every peer is a process with a p2pd of its own. Ours runs as in a step:
`train.stage.segment_reduction` over `daemon.step.reduction.segment_exchange` and
`net.streams.bulk`, by direct lines (with `--no-direct-lines` through libp2p). Theirs is
`hivemind.averaging.DecentralizedAverager` with fp32, its group formed before the clock starts (a
round is what follows the trigger), and `torch.distributed` with Gloo, which seals nothing and has
no p2pd. Rounds of all take turns, so that a busy machine slows each; a round lasts until the
slowest peer has its result. Beside them, in the same rounds: the same bytes between four bare
peers, which only write them to p2pd and read them from it (`benchmarks.raw_peer`).
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peer_processes import PeerProcesses
from benchmarks.reduction_values import ELEMENTS, PEERS

TARGET = 4.0
GLOO_TARGET = 4.0
"""The target: times Gloo's, at most."""


def _meet(peers: PeerProcesses) -> None:
    """Let hivemind's peers meet: the others join the first."""
    peers.tell("[]", 0)
    first = peers.hear(0)["address"]
    for number in range(1, PEERS):
        peers.tell(json.dumps([first]), number)
        peers.hear(number)


def _our_round(peers: PeerProcesses) -> dict[str, Any]:
    peers.hear_all()
    began_s = time.monotonic()
    peers.tell("go")
    return _summary(peers.hear_all(), time.monotonic() - began_s)


def _their_round(peers: PeerProcesses) -> dict[str, Any]:
    peers.tell("form a group")
    if not all(heard["ready"] for heard in peers.hear_all()):
        raise SystemExit("hivemind's averager formed no group of four")
    began_s = time.monotonic()
    peers.tell("go")
    heard = peers.hear_all()
    if any(each["group"] != PEERS or each["error"] > 1e-5 for each in heard):
        raise SystemExit(f"hivemind's averager did not average: {heard}")
    return _summary(heard, time.monotonic() - began_s)


def _summary(heard: list[dict[str, Any]], outside_s: float) -> dict[str, Any]:
    return {
        "slowest_s": max(each["elapsed_s"] for each in heard),
        "outside_s": outside_s,
        "computed_s": sum(each["computed_s"] for each in heard),
        "results": len({each["digest"] for each in heard}),
    }


def measure(rounds: int, direct: bool) -> dict[str, list[dict[str, Any]]]:
    """Rounds of both in turn. The first of each warms up and is left out."""
    with (
        tempfile.TemporaryDirectory(prefix="p2p-dtfm-reduction-") as name,
        PeerProcesses(
            "reduction_peer", PEERS, Path(name), ("direct" if direct else "libp2p",)
        ) as ours,
        PeerProcesses("hivemind_averager", PEERS, Path(name)) as theirs,
        PeerProcesses("gloo_peer", PEERS, Path(name)) as gloo,
        PeerProcesses("raw_peer", PEERS, Path(name)) as bare,
    ):
        ours.introduce()
        _meet(theirs)
        bare.introduce()
        found = [
            (_our_round(ours), _their_round(theirs), _our_round(gloo), _our_round(bare))
            for _ in range(rounds + 1)
        ][1:]
    kinds = ("ours", "hivemind", "gloo", "bare p2pd")
    return dict(zip(kinds, map(list, zip(*found, strict=True)), strict=True))


def report(rows: dict[str, list[dict[str, Any]]], as_json: bool) -> int:
    """Print; 0 if the target is met."""
    median = {k: statistics.median(row["slowest_s"] for row in v) for k, v in rows.items()}
    computed = {k: statistics.median(row["computed_s"] for row in v) for k, v in rows.items()}
    results = {kind: max(row["results"] for row in found) for kind, found in rows.items()}
    ratio = median["hivemind"] / median["ours"]
    over_gloo = median["ours"] / median["gloo"]
    met = ratio >= TARGET and over_gloo <= GLOO_TARGET and results["ours"] == 1
    if as_json:
        figures = {
            "peers": PEERS,
            "bytes": 4 * ELEMENTS,
            "rounds": rows,
            "median_s": median,
            "median_computed_s": computed,
            "different_results": results,
            "ratio": round(ratio, 2),
            "over_gloo": round(over_gloo, 2),
            "bound_share": round(median["bare p2pd"] / median["ours"], 2),
            "most_ratio": round(median["hivemind"] / median["bare p2pd"], 2),
            "target": TARGET,
            "met": met,
        }
        print(json.dumps(figures))
        return 0 if met else 1
    print(f"{4 * ELEMENTS >> 20} MiB among {PEERS} peers on loopback, fp32")
    print(f"{'':10s} {'median s':>9s} {'CPU s':>6s} {'all rounds':42s} different results")
    for kind, found in rows.items():
        times = " ".join(f"{row['slowest_s']:.2f}" for row in found)
        print(f"{kind:10s} {median[kind]:9.2f} {computed[kind]:6.2f} {times:42s} {results[kind]}")
    bare, ours, theirs = median["bare p2pd"], median["ours"], median["hivemind"]
    print(
        f"bare p2pd takes {bare / ours:.0%} of our time; it is {theirs / bare:.2f} times hivemind's"
    )
    print(
        f"{ratio:.2f} times the speed of hivemind's averager, target {TARGET:g}; {over_gloo:.2f} "
        f"times Gloo's time, at most {GLOO_TARGET:g}: {'met' if met else 'MISSED'}"
    )
    return 0 if met else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-direct-lines", action="store_true", help="all through libp2p")
    options = parser.parse_args()
    rows = measure(3 if options.quick else 7, not options.no_direct_lines)
    return report(rows, options.json)


if __name__ == "__main__":
    raise SystemExit(main())

"""A state's file is made beside other threads: an event loop that waits is taken for dead."""

import itertools
import threading
import time

import torch

from p2p_dtfm.train.model.layer_state import LayerSnapshot

COUNT = 9_000_000
TRIES = 25
SHARE = 0.5
"""The share of the time for which a thread has no turn. Where the file holds up all other threads
it is 1."""


def _longest_silence(ends: threading.Event, begins: threading.Event) -> list[float]:
    """How long this thread had no turn, each time. It asks for one every half millisecond."""
    begins.set()
    seen = []
    while not ends.is_set():
        seen.append(time.perf_counter())
        time.sleep(0.0005)
    seen.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(seen)]


def _share_of_silence(snapshot: LayerSnapshot) -> float:
    begins, ends, found = threading.Event(), threading.Event(), list[float]()
    ticking = threading.Thread(target=lambda: found.extend(_longest_silence(ends, begins)))
    ticking.start()
    begins.wait()
    began_s = time.perf_counter()
    payload = snapshot.to_bytes()
    took_s = time.perf_counter() - began_s
    ends.set()
    ticking.join()
    assert len(payload) > 12 * COUNT
    return max(found) / took_s


def test_other_threads_go_on_while_a_large_state_becomes_a_file() -> None:
    """Where the interpreter joined the file's parts, a layer of 2 GB held up the event loop for a
    second or two. The others suspect a peer that is silent for so long. A busy machine may give a
    thread no turn either, but not each time."""
    parts = tuple(torch.full((COUNT,), float(n)) for n in range(3))
    snapshot = LayerSnapshot("0" * 64, 1, 3, (("weight", (COUNT,)),), parts)  # type: ignore[arg-type]
    assert any(_share_of_silence(snapshot) < SHARE for _ in range(TRIES))

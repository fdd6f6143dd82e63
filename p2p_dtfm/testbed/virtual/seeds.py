"""Plays seeds: real daemons in virtual time train a small run to its end through faults.

`python -m p2p_dtfm.testbed.virtual.seeds --seeds 0-99 [--story]`

Daemons are killed and started again, paused, and cut off from each other, as the seed has it. Then
all is mended, and these must hold: each daemon comes to the end of the run; the loss
of each step is that of a single process on the same data, at all that have seen it; each step was
seen; what a peer tells to be safe is not computed again, where links hold and at most one was
killed; nobody has failed, and nothing was raised that nobody caught.
"""

import argparse
import contextlib
import logging
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.peers.run_source import RunComplete
from p2p_dtfm.testbed.plain_losses import plain_losses
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.swarm import NeverHappened, Peer, Swarm, play
from p2p_dtfm.train.data import prepare

STEPS = 40
PEERS = (3, 4)
FAULTS = (2, 6)
FAULTS_BEGIN_S, FAULTS_END_S = 4.0, 24.0
PATIENCE_S = 600.0
"""Of virtual time, once all is mended."""
STARTS_AGAIN_S = 2.0
TOLERANCE = 1e-4
_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "on",
    "as",
    "with",
    "at",
    "by",
    "from",
    "peer",
    "step",
    "layer",
    "plan",
    "view",
    "data",
]


def make_run(folder: Path, steps: int = STEPS, saves_every_steps: int = 20) -> Path:
    """A run spec and its data."""
    draws = random.Random("text")
    text = folder / "text.txt"
    text.write_text(" ".join(draws.choice(_WORDS) for _ in range(6000)))
    prepare(
        [text],
        folder / "prepared",
        name="drawn words",
        licence="none",
        source="https://example.org",
        context=16,
        shard_tokens=20_000,
    )
    spec = RunSpec.model_validate(
        {
            "name": "virtual",
            "seed": 7,
            "total_steps": steps,
            "model": {"layers": 4, "width": 32, "heads": 2, "context": 16, "vocabulary": 256},
            "batch": {"global_batch": 8, "microbatch": 2},
            "optimizer": {"peak_learning_rate": 3e-3, "warmup_steps": 2},
            "evaluation": {"every_steps": 20, "sequences": 4},
            "checkpoint": {"every_steps": saves_every_steps, "keep": 2},
            "data": {"source": str(folder / "prepared")},
        }
    )
    path = folder / "run.json"
    path.write_text(spec.model_dump_json())
    return path


class Broken(AssertionError):
    """An invariant does not hold."""


class Drawn:
    """One seed's faults, on one swarm."""

    def __init__(self, swarm: Swarm, run: Path, seed: int) -> None:
        self.swarm = swarm
        self.done: list[str] = []
        """What was done to whom, for whoever reads a seed's story."""
        self._draws = random.Random(f"faults {seed}")
        self._run = run
        self._steps = RunSpec.model_validate_json(run.read_text()).total_steps
        self._due: list[tuple[float, str, tuple[Peer, ...]]] = []

    async def play(self) -> None:
        swarm, draws = self.swarm, self._draws
        count = draws.randint(*PEERS)
        stays = {"exit_when_done": False}  # for those that come back after the last step
        founder = swarm.peer("a", run=str(self._run), expect_peers=count, **stays)
        for name in "bcdefgh"[: count - 1]:
            swarm.peer(name, initial_peers=(swarm.address(founder),), **stays)
        swarm.start(founder)
        await swarm.until(lambda: founder.has_run, "the run is founded", 60)
        for peer in swarm.peers[1:]:
            swarm.start(peer)
        self._draw(swarm.now_s)
        await self._until_all_are_done()

    def _draw(self, began_s: float) -> None:
        draws, peers = self._draws, self.swarm.peers
        for _ in range(draws.randint(*FAULTS)):
            at_s = began_s + draws.uniform(FAULTS_BEGIN_S, FAULTS_END_S)
            lasts_s = draws.choice((0.3, 1.0, 3.0, 8.0, 20.0)) * draws.uniform(0.5, 1.5)
            kind = draws.choice(("kill", "kill", "pause", "cut", "one-way cut"))
            whom = tuple(draws.sample(peers, 2))
            self._due.append((at_s, kind, whom))
            self._due.append((at_s + lasts_s, f"end of {kind}", whom))
        self._due.sort(key=lambda due: (due[0], due[1]))

    def _do(self, kind: str, whom: tuple[Peer, ...]) -> None:
        """What is impossible now is left out, and what comes after the last step."""
        swarm, (one, other) = self.swarm, whom
        running = [peer for peer in swarm.peers if peer.is_running]
        is_complete = any(peer.told_step() == self._steps for peer in running)
        if is_complete and not kind.startswith("end of"):
            return
        if "cut" in kind:
            if kind.startswith("end of"):
                swarm.mend(one, other)
            else:
                swarm.cut(one, other, both_ways=kind == "cut")
        elif not self._do_to_one(kind, one, len(running)):
            return
        names = one.name if "cut" not in kind else f"{one.name}-{other.name}"
        self.done.append(f"{swarm.now_s:.2f} s: {kind} {names}")
        logging.getLogger("p2p_dtfm").info("--- %s %s", kind, names)

    def _do_to_one(self, kind: str, one: Peer, running_count: int) -> bool:
        is_paused = one.process is not None and one.process.is_paused
        deeds: dict[str, tuple[bool, Callable[[Peer], None]]] = {
            "kill": (one.is_running and running_count > 1, self.swarm.kill),
            "end of kill": (one.was_killed, self.swarm.start),
            "pause": (one.is_running and not is_paused, self.swarm.pause),
            "end of pause": (one.is_running and is_paused, self.swarm.resume),
        }
        is_possible, deed = deeds[kind]
        if is_possible:
            deed(one)
        return is_possible

    async def _until_all_are_done(self) -> None:
        swarm, starts_s = self.swarm, dict[str, float]()
        mended_s = max(at_s for at_s, _, _ in self._due)

        def is_over() -> bool:
            while self._due and self._due[0][0] <= swarm.now_s:
                _, kind, whom = self._due.pop(0)
                self._do(kind, whom)
            for peer in swarm.peers:
                if _gave_up(peer):  # its owner starts it again, after a look at what it says
                    due_s = starts_s.setdefault(peer.name, swarm.now_s + STARTS_AGAIN_S)
                    if swarm.now_s >= due_s:
                        del starts_s[peer.name]
                        swarm.start(peer)
            return not self._due and all(_is_done(peer, self._steps) for peer in swarm.peers)

        limit_s = mended_s - swarm.now_s + PATIENCE_S
        await swarm.until(is_over, "all have come to the end of the run", limit_s)


def _is_done(peer: Peer, steps: int) -> bool:
    """It has all steps, or was told that there are none to come, or has failed: `check` sees."""
    if peer.was_killed or _gave_up(peer) or peer.ended is None or peer.daemon is None:
        return False
    return peer.ended.done() or peer.told_step() == steps


def _gave_up(peer: Peer) -> bool:
    """It has ended, and said that it reaches nobody."""
    if peer.ended is None or not peer.ended.done() or peer.was_killed:
        return False
    error = peer.ended.exception()
    return isinstance(error, UserError) and error.exit_code == UNREACHABLE


def require_safe_steps_stay(peer: Peer) -> None:
    """What a peer has told to be safe, which is from the crash of any one peer, is not computed
    again. Raises `Broken`."""
    safe = 0
    for event in peer.events():
        if event["event"] != "step":
            continue
        if event["step"] < safe:
            raise Broken(f"{peer.name}: step {event['step']} again, with {safe} safe ones")
        safe = max(safe, event["safe_step"] or 0)


def check(swarm: Swarm, reference: list[float], done: list[str]) -> None:
    """Raises `Broken`."""
    cuts, kills = (sum(word in what for what in done) for word in ("cut", ": kill"))
    seen: set[int] = set()
    for peer in swarm.peers:
        assert peer.ended is not None
        error = peer.ended.exception() if peer.ended.done() else None
        if error is not None and not isinstance(error, RunComplete):
            raise Broken(f"{peer.name} failed: {error!r}") from error
        if failures := peer.failures():
            raise Broken(f"{peer.name}: {failures[0]}")
        if not cuts and kills <= 1:
            require_safe_steps_stay(peer)
        for step, loss in peer.losses().items():
            seen.add(step)
            if not math.isclose(loss, reference[step], rel_tol=TOLERANCE):
                raise Broken(f"{peer.name}, step {step}: loss {loss}, not {reference[step]}")
    if missing := set(range(len(reference))) - seen:
        raise Broken(f"nobody has told of the steps {sorted(missing)}")


def play_seed(seed: int, run: Path, folder: Path, reference: list[float]) -> Drawn:
    """Raises `Broken` or `NeverHappened`, with what was done as notes."""
    drawn: list[Drawn] = []

    async def scene(swarm: Swarm) -> None:
        drawn.append(Drawn(swarm, run, seed))
        try:
            await drawn[0].play()
            check(swarm, reference, drawn[0].done)
        except AssertionError as error:
            for what in drawn[0].done:
                error.add_note(what)
            raise

    play(seed, folder, scene)
    return drawn[0]


def reference_of(run: Path, folder: Path) -> list[float]:
    """The losses of a single process."""

    async def scene(swarm: Swarm) -> Path:
        peer = swarm.peer("a", run=str(run))
        swarm.start(peer)
        await swarm.until(lambda: not peer.is_running, "a run by one", PATIENCE_S)
        assert peer.ended is not None
        peer.ended.result()
        return peer.home

    losses = plain_losses(
        play(0, folder, scene), RunSpec.model_validate_json(run.read_text()).total_steps
    )
    assert losses is not None
    return losses


class _Story(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        process = PROCESS.get()
        if process is None:
            return record.getMessage()
        return f"{process.monotonic_ns() / 1e9:9.3f} {process.name} {record.getMessage()}"


@contextlib.contextmanager
def _telling(aloud: bool) -> Iterator[None]:
    log = logging.getLogger("p2p_dtfm")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Story())
    log.setLevel(logging.DEBUG if aloud else logging.CRITICAL)
    if aloud:
        log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _memory_disk() -> str | None:
    """Where homes cost no waiting for a disk, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-9", help="A-B or one")
    parser.add_argument("--story", action="store_true", help="tell what the daemons log")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    broken: list[int] = []
    seeds = range(int(first), int(last or first) + 1)
    with tempfile.TemporaryDirectory(dir=_memory_disk()) as scratch, _telling(False):
        folder = Path(scratch)
        run = make_run(folder)
        reference = reference_of(run, folder / "reference")
        began_s = time.monotonic()
        for seed in seeds:
            try:
                with (
                    _telling(options.story),
                    tempfile.TemporaryDirectory(dir=_memory_disk()) as home,
                ):
                    drawn = play_seed(seed, run, Path(home), reference)
            except (Broken, NeverHappened) as error:
                broken.append(seed)
                print(f"seed {seed}: {error}", *getattr(error, "__notes__", ()), sep="\n  ")
            else:
                swarm = drawn.swarm
                faults = len(drawn.done)
                ended_s = swarm.now_s - 1000
                print(f"seed {seed}: {ended_s:.1f} s, {faults} faults, {swarm.trace.digest()}")
            sys.stdout.flush()
        took_s = time.monotonic() - began_s
    rate = 60 * len(seeds) / took_s
    print(f"{len(seeds)} seeds, {len(broken)} broken {broken or ''}, {rate:.1f} a minute")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

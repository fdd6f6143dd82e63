"""A swarm of real daemons, and the effect of an attack on its honest members."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from p2p_dtfm.core.protocol.run_spec import BatchSpec, EvaluationSpec, ModelSpec, RunSpec
from p2p_dtfm.core.protocol.sections.checkpoint_spec import CheckpointSpec
from p2p_dtfm.core.protocol.sections.data_spec import DataSpec
from p2p_dtfm.core.protocol.sections.optimizer_spec import OptimizerSpec
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.lies.played import MODULE, OPTIONS, environment, told
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.train.data import prepare

DEADLINE_S = 180.0
POLL_S = 0.1
STEPS_BEFORE = 20
AFTERMATH_S = 12.0
JOIN_LIMIT_S = 60.0


@dataclass
class Seen:
    """The result of one attack."""

    longest_span_s: float = 0.0
    """The longest time without a commit at an honest member, from the attack's beginning on."""
    usual_span_s: float = 0.0
    """The longest such time before the attack."""
    ended: int = 0
    """Honest daemons that have ended."""
    forked_steps: int = 0
    """Steps whose losses honest members tell differently."""
    grown_mib: int = 0
    """The most resident memory of the honest member that grew most."""
    join_s: float | None = None
    """Seconds until an honest newcomer was let in; None: it was not within a minute."""
    notes: dict[str, Any] = field(default_factory=dict)


def run_spec(directory: Path, total_steps: int) -> Path:
    """A small model; its learning rate lets gradients that lie show in the loss."""
    data = directory / "data"
    prepare([Path(__file__).parent.parent.parent / "README.md"], data, context=64)
    spec = RunSpec(
        name="attacked",
        seed=7,
        total_steps=total_steps,
        model=ModelSpec(layers=4, width=64, heads=2, context=64, vocabulary=256),
        batch=BatchSpec(global_batch=16, microbatch=2),
        optimizer=OptimizerSpec(peak_learning_rate=2e-4, warmup_steps=20),
        data=DataSpec(source=str(data)),
        evaluation=EvaluationSpec(every_steps=10_000, sequences=4),
        checkpoint=CheckpointSpec(every_steps=50, keep=2),
    )
    path = directory / "run.json"
    path.write_text(spec.model_dump_json())
    return path


def commits(child: Child) -> list[dict[str, Any]]:
    return [event for event in child.events() if event["event"] == "step"]


def resident_mib(child: Child) -> int:
    try:
        return int(psutil.Process(child.process.pid).memory_info().rss >> 20)
    except psutil.Error:
        return 0


class Watched:
    """Members of a swarm, of which the `honest` ones are measured."""

    def __init__(self, swarm: LocalSwarm, address: str, honest: Sequence[Child]) -> None:
        self.swarm, self.address, self.honest = swarm, address, list(honest)
        self._began_s = 0.0
        self._before_mib: list[int] = []
        self._most_mib: list[int] = []

    def until_step(self, step: int) -> None:
        """Wait until all honest members are at this step. Raises `SystemExit` if they do not get
        there."""
        end_s = time.monotonic() + DEADLINE_S
        while min(len(commits(child)) for child in self.honest) < step:
            if time.monotonic() > end_s or not all(child.running for child in self.honest):
                raise SystemExit(f"error: {step} steps did not happen before the attack")
            time.sleep(POLL_S)

    def begin(self) -> None:
        self._began_s = time.time()
        self._before_mib = [resident_mib(child) for child in self.honest]
        self._most_mib = list(self._before_mib)

    def look(self) -> None:
        """Take a sample, now and then, while the attack goes on."""
        now_mib = [resident_mib(child) for child in self.honest]
        self._most_mib = [max(pair) for pair in zip(self._most_mib, now_mib, strict=True)]

    def let_in(self) -> float | None:
        """Seconds until an honest newcomer takes part."""
        began_s = time.monotonic()
        newcomer = self.swarm.join(self.address)
        while time.monotonic() < began_s + JOIN_LIMIT_S:
            facts = newcomer.status()
            if facts and facts["state"] in ("training", "spare"):
                return time.monotonic() - began_s
            time.sleep(POLL_S)
        return None

    def end(self, notes: Mapping[str, Any], join_s: float | None) -> Seen:
        now_s = time.time()
        seen = Seen(notes=dict(notes), join_s=join_s)
        seen.ended = sum(not child.running for child in self.honest)
        for child in self.honest:
            times_s = [event["time_s"] for event in commits(child)]
            before = [at_s for at_s in times_s if at_s <= self._began_s]
            after = [self._began_s, *(at_s for at_s in times_s if at_s > self._began_s), now_s]
            seen.usual_span_s = max(seen.usual_span_s, _longest(before[STEPS_BEFORE // 2 :]))
            seen.longest_span_s = max(seen.longest_span_s, _longest(after))
        curves = [
            {event["step"]: event["loss"] for event in commits(child)} for child in self.honest
        ]
        for step in set.union(*map(set, curves)):
            told = {curve[step] for curve in curves if curve.get(step) is not None}
            seen.forked_steps += len(told) > 1
        grown = zip(self._before_mib, self._most_mib, strict=True)
        seen.grown_mib = max(most - before for before, most in grown)
        return seen


def _longest(times_s: Sequence[float]) -> float:
    return max((b - a for a, b in itertools.pairwise(times_s)), default=0.0)


@contextmanager
def swarm_of(
    directory: Path, count: int, lie: Lie | None = None, steps: int = 100_000
) -> Iterator[Watched]:
    """A swarm of so many members that train; with `lie` the second is a liar."""
    spec = run_spec(directory, steps)
    module = MODULE if lie is not None else "p2p_dtfm"
    with LocalSwarm(directory, OPTIONS, module) as local:
        _, address = local.found(["--run", str(spec), "--expect-peers", str(count)])
        for number in range(1, count):
            with environment(told(lie) if lie is not None and number == 1 else {}):
                local.join(address)
        liars = {1} if lie else set()
        honest = [child for number, child in enumerate(local.children) if number not in liars]
        watched = Watched(local, address, honest)
        watched.until_step(STEPS_BEFORE)
        yield watched

"""Plays a swarm with audits in which some members lie together.

It finds which members are caught after how many steps, which honest ones are barred, and what that
cost. It also compares the losses with those of an honest run.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from pydantic import ValidationError

from p2p_dtfm.core.cost_model.tables.stage_memory import stage_memory
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.testbed.kill_storm import peer_id_of
from p2p_dtfm.testbed.lies.equal import fair_step_s
from p2p_dtfm.testbed.lies.kinds import (
    EVALUATED_EVERY,
    KINDS,
    NEXT_STAGE,
    LieKind,
    Promise,
    undone,
)
from p2p_dtfm.testbed.lies.lie import LIE_VARIABLE, MEMORY_VARIABLE, PACE_VARIABLE, Lie
from p2p_dtfm.testbed.lies.verdict import (
    LieVerdict,
    judge,
    what_it_cost,
    what_was_undone,
    when_it_was_fair,
    who_is_barred,
    who_was_caught,
    who_was_doubted,
)
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.plain_losses import (
    NOTHING_SAVED,
    comparable,
    plain_losses,
    why_not_plain,
)
from p2p_dtfm.testbed.recovery.times import Event, steps_of

MODULE = "p2p_dtfm.testbed.lies.daemon"
OPTIONS = ("--threads", "1", "--dashboard", "off")
UNDONE_FROM = 2
"""How many times `undo` steps come before the first lie, and are honest."""
NEWCOMER_STEPS = 150
"""Enough for a newcomer to join, follow, and take part."""
FOLLOW_STEPS = 10
"""`follow_steps` for such a newcomer, which has no stage yet."""
RATES = 5
"""How many times as many steps are played as it takes on average until a liar is drawn."""
START_S = 300.0
"""Time until all train, and while members wait for one that withholds something."""
STEP_S = 1.0
"""Time of a step for each daemon: all of them share one machine."""
POLL_S = 0.2
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class LieCase:
    """`peers` daemons, some of which lie, and how."""

    run: str
    kind: str
    strength: float
    peers: int
    rate: float
    liars: int
    together: bool = True
    """Each liar finds nothing wrong with the others' work."""
    undo: int = 0
    """How many steps before the proof are taken back when a liar is barred; 0: none."""
    device: str = "cpu"
    """The device that all daemons share."""

    @property
    def of(self) -> LieKind:
        return KINDS[self.kind]

    @property
    def promise(self) -> Promise:
        """Its kind's promise, or what that becomes if liars' work is undone."""
        return undone(self.of.promise) if self.undo else self.of.promise

    @property
    def from_step(self) -> int:
        """The step of the first lie. Where lies are undone, the run goes back to a step before it
        that is not the beginning."""
        return max(self.of.from_step, UNDONE_FROM * self.undo)

    @property
    def within(self) -> int | None:
        """In which of its lying steps a liar is out at the latest."""
        within = self.promise.within
        return within if within is None else max(within, self._steps_to_draw)

    @property
    def may_stay(self) -> bool:
        """Steps with a lie in work are kept if nobody drew that work."""
        return self.rate < 1.0 and not self.of.is_paced

    @property
    def _steps_to_draw(self) -> int:
        """Steps to draw a liar at this rate; 0 if the rate is at least that of the kind's
        promise."""
        return math.ceil(RATES / self.rate) if self.rate < self.of.rate else 0

    @property
    def steps(self) -> int:
        if self.of.newcomer:
            return NEWCOMER_STEPS
        return self.from_step + max(self.of.steps_after, self._steps_to_draw)

    @property
    def limit_s(self) -> float:
        return START_S + STEP_S * self.steps * self.peers

    def spec(self, run: RunSpec) -> RunSpec:
        """The run with audits. Raises `UserError` where the run cannot have them."""
        more = {"follow_steps": FOLLOW_STEPS} if self.of.newcomer else {}
        audit = {"rate": self.rate, "undo_steps": self.undo, **more}
        changes = {
            "audit": run.audit.model_copy(update=audit),
            "evaluation": run.evaluation.model_copy(update={"every_steps": EVALUATED_EVERY}),
            "compute": run.compute.model_copy(update={"precision": "fp32"}),
        }
        changed = comparable(run, self.steps).model_copy(update=changes)
        try:
            return RunSpec.model_validate(changed.model_dump())
        except ValidationError as error:
            why = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
            raise UserError(
                f"the run {self.run} cannot have audits: {why}", "name another one: --run tiny"
            ) from error

    def environment(self, spec: RunSpec) -> dict[str, str]:
        """For all daemons: what their plan depends on."""
        memory = {MEMORY_VARIABLE: str(two_thirds_bytes(spec))} if self.of.pipelines else {}
        return memory | ({PACE_VARIABLE: "1"} if self.of.is_paced else {})


def two_thirds_bytes(spec: RunSpec) -> int:
    """Two thirds of what the model takes where replicas share it, with what one microbatch saves.
    So nobody has all layers."""
    layers = stage_memory(workload_of(spec)).shared.layers
    whole = layers.state_bytes(0, layers.count) + layers.saved_bytes(0, layers.count)
    return whole * 2 // 3


def play(directory: Path, case: LieCase, spec: RunSpec, say: Callable[[str], None]) -> LieVerdict:
    """Plays the case. Blocks. Raises `UserError` where no swarm comes about."""
    names = [f"peer-{number}" for number in range(case.peers)]
    ids = {name: peer_id_of(directory / name) for name in names}
    lying = liars_of(case, ids)
    colluders = tuple(ids[name] for name in lying) if case.together else ()
    lie = Lie(case.kind, case.from_step, case.strength, colluders)
    (directory / "run.json").write_text(spec.model_dump_json())
    verdict, liars = LieVerdict(), {ids[name]: name for name in lying}
    with (
        environment(case.environment(spec)),
        LocalSwarm(directory, (*OPTIONS, "--device", case.device), MODULE) as swarm,
    ):
        run = ["--run", str(directory / "run.json"), "--expect-peers", str(case.peers)]
        first, address = swarm.found(run, names[0], directory / names[0])
        for name in names[1:]:
            with environment(told(lie) if name in lying else {}):
                swarm.join(address, (), name, directory / name)
        say(_what_is_played(case, lying))
        honest = [it for it in swarm.children if it.name not in lying]
        if case.of.newcomer:
            _until_step(first, case, verdict)
            honest.append(swarm.join(address, (), "newcomer", directory / "newcomer"))
        _until_done(swarm.children, honest, case, verdict)
        who_is_barred(_barred_by(first), liars, verdict)
    history = _of_who_was_never_out(honest)
    who_was_caught(history, liars, lie.from_step, verdict, case.of.needs, case.of.every)
    texts = ((child.home / "stderr").read_text(errors="replace") for child in honest)
    who_was_doubted(texts, liars, verdict)
    others = {peer_id: name for name, peer_id in ids.items() if name not in lying}
    what_it_cost(history, others, lie.from_step, verdict)
    _look_at_times(history, case, spec, verdict)
    compare_losses(honest, case, spec, verdict)
    if case.of.newcomer:
        _compare_newcomer(first, honest[-1], verdict)
    what_was_undone(history, liars, spec, verdict)
    stays = case.may_stay and not verdict.is_undone
    judge(case.promise, case.within, math.inf if stays else LOSS_TOLERANCE, verdict)
    return verdict


def liars_of(case: LieCase, ids: dict[str, str]) -> list[str]:
    """Names of the liars. The first name founds, and is honest. A lie about what goes to the next
    stage needs a first stage: of equal peers every other one, by id, has it."""
    firsts = sorted(ids, key=ids.__getitem__)[::2]
    may_lie = [name for name in ids if case.of.needs != NEXT_STAGE or name in firsts]
    return [name for name in may_lie if name != next(iter(ids))][-case.liars :]


def _what_is_played(case: LieCase, lying: list[str]) -> str:
    verb = "lies" if case.liars == 1 else "lie"
    who = f"{counted(case.peers, 'daemon')}, of which {', '.join(lying)} {verb}"
    return f"{who} from step {case.from_step} on: {case.of.what}"


def told(lie: Lie) -> dict[str, str]:
    """Environment of a daemon that is to lie."""
    return {LIE_VARIABLE: msgspec.json.encode(lie).decode()}


@contextmanager
def environment(more: dict[str, str]) -> Iterator[None]:
    """Adds to the environment of daemons that are started meanwhile."""
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            del os.environ[name]


def _until_step(first: Child, case: LieCase, verdict: LieVerdict) -> None:
    """Waits for the first step that commits."""
    end_s = time.monotonic() + case.limit_s
    while not steps_of(first.events()):
        if time.monotonic() > end_s or not first.running:
            verdict.violations.append("no step has committed")
            return
        time.sleep(POLL_S)


def _until_done(
    children: list[Child], honest: list[Child], case: LieCase, verdict: LieVerdict
) -> None:
    """Waits until each honest daemon has the last step and its checkpoint. One without a place then
    ends by itself, as the run is complete; no other does."""
    end_s = time.monotonic() + case.limit_s
    while not all(_is_done(child) for child in honest):
        if ended := [child.name for child in children if child.process.poll()]:
            verdict.violations.append(f"{', '.join(ended)} ended")
            break
        if time.monotonic() > end_s:
            verdict.violations.append(
                f"nobody has ended {counted(case.steps, 'step')} within {case.limit_s:.0f} s"
            )
            break
        time.sleep(POLL_S)
    verdict.steps = 1 + max((it["step"] for it in steps_of(honest[0].events())), default=-1)


def _is_done(child: Child) -> bool:
    return child.process.poll() == 0 or (child.status() or {}).get("state") == "done"


def _barred_by(child: Child) -> set[str]:
    return {it["peer_id"] for it in (child.status() or {}).get("barred", ())}


def _of_who_was_never_out(honest: Sequence[Child]) -> list[Event]:
    """The history of an honest daemon that has seen the most steps, and then the most views: others
    may have lost their places for a while."""

    def seen(history: list[Event]) -> tuple[int, int]:
        views = sum(event["event"] == "view" for event in history)
        return len({event["step"] for event in steps_of(history)}), views

    return max((child.events() for child in honest), key=seen)


def _look_at_times(
    history: Sequence[Event], case: LieCase, spec: RunSpec, verdict: LieVerdict
) -> None:
    """Judges the steps' times if daemons take as long as they say."""
    if case.of.is_paced:
        when_it_was_fair(history, fair_step_s(spec, case.peers), verdict)


def compare_losses(honest: list[Child], case: LieCase, spec: RunSpec, verdict: LieVerdict) -> None:
    """Compares losses with those of an honest run in one process, where that says anything."""
    verdict.not_compared = why_not_plain(spec) or None
    if verdict.not_compared:
        return
    from p2p_dtfm.train.stage.timed import use_one_thread

    use_one_thread()  # several wait for one another wherever the machine does other things, too
    expected = plain_losses(honest[0].home, case.steps)
    seen = [
        (event["step"], event["loss"])
        for child in honest
        for event in {it["step"]: it for it in steps_of(child.events())}.values()
    ]
    if expected is None or not seen:
        verdict.not_compared = NOTHING_SAVED if seen else "no step has committed"
    else:
        verdict.max_loss_difference = max(abs(loss - expected[step]) for step, loss in seen)


def _compare_newcomer(first: Child, newcomer: Child, verdict: LieVerdict) -> None:
    theirs = {event["step"]: event["loss"] for event in steps_of(first.events())}
    own = {event["step"]: event["loss"] for event in steps_of(newcomer.events())}
    if not own:
        verdict.violations.append("the newcomer has taken part in no step")
    elif any(theirs.get(step) != loss for step, loss in own.items()):
        verdict.violations.append("the newcomer has other losses than the others")

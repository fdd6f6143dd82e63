"""A swarm with audits of which a part lies together: who is caught, after how many steps, who is
barred that has not lied, and how far the others' losses are from those of an honest run."""

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from pydantic import ValidationError

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.testbed.kill_storm import peer_id_of
from p2p_dtfm.testbed.lies.kinds import LIE_VARIABLE, Lie
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.plain_losses import comparable, plain_losses
from p2p_dtfm.testbed.recovery.times import steps_of

MODULE = "p2p_dtfm.testbed.lies.daemon"
OPTIONS = ("--threads", "1", "--dashboard", "off")
FIRST_LIE = 5
STEPS_AFTER = 25
RATES = 5
"""So many times as many steps as it takes on average until a liar is drawn."""
START_S = 120.0
STEP_S = 1.0
"""Of each daemon: all of them share one machine."""
POLL_S = 0.2
LOSS_TOLERANCE = 1e-4
LEFT_OUT = re.compile(r"leaves out (?!one of )(\w+): ")
IN_DOUBT = re.compile(r"leaves out one of (\w+) and (\w+): ")


@dataclass(frozen=True)
class LieCase:
    """`peers` daemons, a quarter of them liars."""

    run: str
    kind: str
    strength: float
    peers: int
    rate: float

    @property
    def liars(self) -> int:
        return self.peers // 4

    @property
    def steps(self) -> int:
        return FIRST_LIE + max(STEPS_AFTER, math.ceil(RATES / self.rate))

    @property
    def limit_s(self) -> float:
        return START_S + STEP_S * self.steps * self.peers

    def spec(self, run: RunSpec) -> RunSpec:
        """Raises `UserError` where the run cannot have audits."""
        audit = run.audit.model_copy(update={"rate": self.rate})
        changed = comparable(run, self.steps).model_copy(update={"audit": audit})
        try:
            return RunSpec.model_validate(changed.model_dump())
        except ValidationError as error:
            why = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
            raise UserError(
                f"the run {self.run} cannot have audits: {why}", "name another one: --run tiny"
            ) from error


@dataclass
class LieVerdict:
    violations: list[str] = field(default_factory=list)
    steps: int = 0
    caught_after: dict[str, int | None] = field(default_factory=dict)
    """By liar: in which step in which it lied, counted from 1; None: it never was."""
    barred: list[str] = field(default_factory=list)
    """Of the liars, by the word of the first daemon at the end."""
    false_bars: list[str] = field(default_factory=list)
    wrongly_left_out: list[str] = field(default_factory=list)
    """Honest ones of whom it was said that they lie."""
    doubted: list[str] = field(default_factory=list)
    """Honest ones that were one of two of whom nobody knew which one lies."""
    max_loss_difference: float | None = None
    """To an honest run in one process."""


def play(directory: Path, case: LieCase, spec: RunSpec, say: Callable[[str], None]) -> LieVerdict:
    """Blocks. Raises `UserError` where no swarm comes about."""
    names = [f"peer-{number}" for number in range(case.peers)]
    ids = {name: peer_id_of(directory / name) for name in names}
    lying = names[-case.liars :]
    lie = Lie(case.kind, FIRST_LIE, case.strength, tuple(ids[name] for name in lying))
    (directory / "run.json").write_text(spec.model_dump_json())
    with LocalSwarm(directory, OPTIONS, MODULE) as swarm:
        run = ["--run", str(directory / "run.json"), "--expect-peers", str(case.peers)]
        first, address = swarm.found(run, names[0], directory / names[0])
        for name in names[1:]:
            with _environment(lie if name in lying else None):
                swarm.join(address, (), name, directory / name)
        say(
            f"{counted(case.peers, 'daemon')}, of which {', '.join(lying)} lie from step "
            f"{FIRST_LIE} on"
        )
        verdict, honest = LieVerdict(), [it for it in swarm.children if it.name not in lying]
        _until_done(swarm.children, honest, case, verdict)
        liars = {ids[name]: name for name in lying}
        _who_was_caught(honest, liars, verdict)
        _who_is_barred(first, liars, verdict)
    _compare(first, case, verdict)
    return verdict


@contextmanager
def _environment(lie: Lie | None) -> Iterator[None]:
    """Of a daemon that is started meanwhile."""
    if lie is None:
        yield
        return
    os.environ[LIE_VARIABLE] = msgspec.json.encode(lie).decode()
    try:
        yield
    finally:
        del os.environ[LIE_VARIABLE]


def _until_done(
    children: list[Child], honest: list[Child], case: LieCase, verdict: LieVerdict
) -> None:
    """Till each that is honest has the last step and its checkpoint; no liar ends before."""
    end_s = time.monotonic() + case.limit_s
    while not all(_is_done(child) for child in honest):
        if ended := [child.name for child in children if not child.running]:
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
    return (child.status() or {}).get("state") == "done"


def _who_was_caught(honest: list[Child], liars: dict[str, str], verdict: LieVerdict) -> None:
    """By the first view of the first daemon without each, and by what all have said."""
    views = [event for event in honest[0].events() if event["event"] == "view"]
    for peer_id, name in liars.items():
        without = [it["step"] for it in views if peer_id not in it["members"]]
        late = [step for step in without if step >= FIRST_LIE]
        verdict.caught_after[name] = late[0] - FIRST_LIE + 1 if late else None
        if not late:
            verdict.violations.append(f"{name} lied to the end")
    texts = [(child.home / "stderr").read_text(errors="replace") for child in honest]
    named = {peer_id for text in texts for peer_id in LEFT_OUT.findall(text)}
    pairs = {peer for text in texts for pair in IN_DOUBT.findall(text) for peer in pair}
    verdict.wrongly_left_out = sorted(named - liars.keys())
    verdict.doubted = sorted(pairs - liars.keys())
    if verdict.wrongly_left_out:
        verdict.violations.append(f"{', '.join(verdict.wrongly_left_out)} called liars, and is not")


def _who_is_barred(first: Child, liars: dict[str, str], verdict: LieVerdict) -> None:
    barred = {it["peer_id"] for it in (first.status() or {}).get("barred", ())}
    verdict.barred = sorted(liars[peer_id] for peer_id in barred & liars.keys())
    verdict.false_bars = sorted(barred - liars.keys())
    if verdict.false_bars:
        verdict.violations.append(f"{', '.join(verdict.false_bars)} barred for nothing")


def _compare(first: Child, case: LieCase, verdict: LieVerdict) -> None:
    from p2p_dtfm.train.stage.timed import use_one_thread

    use_one_thread()  # several wait for one another wherever the machine does other things, too
    expected = plain_losses(first.home, case.steps)
    seen = {event["step"]: event["loss"] for event in steps_of(first.events())}
    if expected is None or not seen:
        return
    worst = max(abs(loss - expected[step]) for step, loss in seen.items())
    verdict.max_loss_difference = worst
    if case.rate == 1.0 and not worst <= LOSS_TOLERANCE:  # else steps that nobody drew are kept
        verdict.violations.append(f"the loss is {worst:.2g} off the honest run's")

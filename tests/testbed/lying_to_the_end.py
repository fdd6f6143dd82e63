"""Schedules in which some members lie in one way from the first second on, with audits, and what
became of the honest members."""

import math
from pathlib import Path

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.seeds.playing import Play
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from p2p_dtfm.testbed.virtual.swarm import Swarm


def lying_to_the_end(kind: str, members: str, liars: str, rate: float) -> Schedule:
    """A member or a liar for each letter. Several liars do it together."""
    return Schedule(
        tuple(members),
        (),
        tuple(Fault(1.0, math.inf, "lie", (name,), 0.0, kind) for name in liars),
        is_audited=True,
        liars=tuple(liars),
        lie_together=len(liars) > 1,
        audit_rate=rate,
    )


def of_single_sequences(run: Path) -> Path:
    """The run with a microbatch for each of eight members."""
    spec = RunSpec.model_validate_json(run.read_text())
    batch = spec.batch.model_copy(update={"microbatch": 1})
    run.write_text(spec.model_copy(update={"batch": batch}).model_dump_json())
    return run


async def with_lies(swarm: Swarm, run: Path, schedule: Schedule) -> Play:
    """The schedule, played to its end."""
    one = Play(swarm, run, schedule)
    with put_in(one.lying, schedule.lies):
        await one.play()
    return one


def views_with_all_honest(one: Play) -> list[set[str]]:
    """The members of each view of each honest peer. No honest peer is left out of any of them."""
    honest = {peer.peer_id for peer in one.honest()}
    told = (event for peer in one.honest() for event in peer.events())
    seen = [set(event["members"]) for event in told if event["event"] == "view"]
    assert all(honest <= view for view in seen), [sorted(honest - view) for view in seen]
    return seen

"""A swarm of real daemons on this machine, with emulated devices, over shaped links. Its
measurements are of real protocol, real bytes and real waiting, and of no real computing."""

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import (
    BatchSpec,
    ComputeSpec,
    EvaluationSpec,
    ModelSpec,
    RunSpec,
)
from p2p_dtfm.core.protocol.sections.checkpoint_spec import CheckpointSpec
from p2p_dtfm.core.protocol.sections.data_spec import DataSpec
from p2p_dtfm.core.protocol.sections.optimizer_spec import OptimizerSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.net.shaping import Shape
from p2p_dtfm.sim.scenario.execution import OURS, Execution
from p2p_dtfm.sim.scenario.scenario import Scenario, load_scenario
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.scenario_swarm import SHAPE_FILE, cast_scenario
from p2p_dtfm.train.data import prepare
from p2p_dtfm.train.model.kinds.registry import with_sizes

LABEL = "emulated devices, shaped links"
"""The remark that stands wherever figures of such a swarm do."""
SCENARIOS = Path(__file__).parent / "scenarios"
WARM_STEPS = 2
"""The first steps of a view: streams open, and a lane may double its streams."""
NEVER = 1 << 30
TEXT_LINES = 4000
TRACED_STEPS = 16
START_S = 300.0
POLL_S = 0.25
TRACE_S = 60.0
TRACE_ATTEMPTS = 5
FORCED_PLAN_VARIABLE = "BENCHMARK_PLAN"
EXECUTION_VARIABLE = "BENCHMARK_EXECUTION"
EXECUTION: Execution = replace(
    OURS, activation_codec="fp32", gradient_codec="fp32", recompute=False
)
"""How the daemons of these swarms carry out a plan, in the simulator's words."""


@dataclass(frozen=True)
class Span:
    """One activity of a peer, in nanoseconds by the founder's clock."""

    kind: str
    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Played:
    """A run of a swarm; peers have the names of the scenario."""

    scenario: Scenario
    spec: RunSpec
    snapshot: Snapshot
    """The plan that the daemons agreed on, with their peer ids and measured links."""
    plan: Plan
    step_s: list[float]
    """Seconds of the steps of the last view, from one commit to the next."""
    spans: dict[str, dict[int, list[Span]]]
    """Spans by peer and step."""
    processors: float
    """Processors that all daemons and their p2pd used together, on average, while steps were
    measured."""


def emulated_spec(blocks: int = 16, microbatches: int = 24) -> RunSpec:
    """A run with 128 KiB for each activation and 0.8 MB for each block's gradient."""
    return RunSpec(
        name="emulated",
        seed=1,
        total_steps=NEVER,
        model=ModelSpec(layers=blocks, width=128, heads=4, context=64, vocabulary=256),
        batch=BatchSpec(global_batch=4 * microbatches, microbatch=4),
        optimizer=OptimizerSpec(peak_learning_rate=1e-3),
        data=DataSpec(source="data"),
        evaluation=EvaluationSpec(every_steps=NEVER, sequences=4),
        checkpoint=CheckpointSpec(every_steps=NEVER),
        compute=ComputeSpec(recompute="never"),  # as the simulator: everywhere or nowhere
    )


def unlike_spec(microbatches: int) -> RunSpec:
    """A run with blocks of two widths. Between the narrow ones a microbatch crosses in 128 KiB, and
    between the wide ones in 256."""
    narrow, wide = [{"kind": "block"}] * 4, [{"kind": "block", "heads": 8}] * 5
    up, down = ({"kind": "projection", "width": width} for width in (256, 128))
    listed = [{"kind": "embedding"}, *narrow, up, *wide, down, *narrow, {"kind": "head"}]
    like = emulated_spec(len(listed) - 2, microbatches).model_dump()
    return with_sizes(RunSpec.model_validate({**like, "name": "unlike", "layers": listed}))


def scenario_file(name: str) -> Scenario:
    return load_scenario(SCENARIOS / f"{name}.toml")


def four_of(name: str) -> Scenario:
    """The first two and the last two peers of a scenario: what `--quick` has time for."""
    scenario = scenario_file(name)
    names = tuple(peer.name for peer in scenario.peers)
    return scenario.with_peers(names[:2] + names[-2:])


def slowed(scenario: Scenario, factor: int) -> Scenario:
    """All devices and links so many times slower. As simulated, every time of a step is so many
    times longer. What the machine that plays the swarm adds stays as it is."""
    peers = tuple(
        replace(
            peer,
            forward_flops=peer.forward_flops and peer.forward_flops // factor,
            uplink_bytes_per_s=peer.uplink_bytes_per_s // factor,
            downlink_bytes_per_s=peer.downlink_bytes_per_s // factor,
        )
        for peer in scenario.peers
    )
    links = {
        ends: replace(
            link, latency_ns=link.latency_ns * factor, bytes_per_s=link.bytes_per_s // factor
        )
        for ends, link in scenario.links.items()
    }
    name = scenario.name if factor == 1 else f"{scenario.name} / {factor}"
    return replace(scenario, name=name, peers=peers, links=links)


def play(
    scenario: Scenario,
    steps: int,
    directory: Path,
    spec: RunSpec | None = None,
    forced: Plan | None = None,
    execution: str = "",
    text_lines: int = TEXT_LINES,
) -> Played:
    """Let a swarm live through a scenario for so many measured steps.

    `forced`: a plan by the scenario's names that the daemons take in place of the planner's;
    `execution`: "gpipe" for DT-FM's (`benchmarks.daemon_with_plan`); `text_lines`: of the data,
    which the founder has alone at first, some 27 bytes each.
    """
    spec = (spec or emulated_spec()).model_copy(update={"total_steps": NEVER})
    run = _run_file(spec, directory, text_lines)
    environment = dict(os.environ)
    module = "p2p_dtfm" if forced is None else "benchmarks.daemon_with_plan"
    with LocalSwarm(directory, ("--threads", "1", "--dashboard", "off"), module) as swarm:
        homes = [swarm.home(number) for number in range(len(scenario.peers))]
        players = cast_scenario(scenario, homes, directory / SHAPE_FILE)
        names = {p.peer_id: p.name for p in Shape.load(directory / SHAPE_FILE).peers}
        if forced is not None:
            ids = {name: peer_id for peer_id, name in names.items()}
            path = directory / "plan.json"
            path.write_bytes(msgspec.json.encode(renamed(forced, ids)))
            os.environ |= {FORCED_PLAN_VARIABLE: str(path), EXECUTION_VARIABLE: execution}
        try:
            expected = ["--expect-peers", str(len(players)), "--expect-wait-s", str(START_S)]
            founder, *others = players
            arguments = ["--run", str(run), *expected, *founder.arguments]
            first, address = swarm.found(arguments, founder.name)
            for player in others:
                swarm.join(address, player.arguments, player.name)
            processors = _wait(swarm, first, WARM_STEPS + steps + 1)
            held = call_daemon(first.home, "plan", timeout_s=TRACE_S)
            traced = _traced(first)
        finally:
            os.environ.clear()
            os.environ.update(environment)
            _end_at_once(swarm.children)
        step_s = _step_s(first)
    return Played(
        scenario=scenario,
        spec=spec,
        snapshot=msgspec.convert(held["snapshot"], Snapshot, strict=False),
        plan=renamed(msgspec.convert(held["plan"], Plan), names),
        step_s=step_s,
        spans=_spans(traced, names),
        processors=processors,
    )


def renamed(plan: Plan, names: dict[str, str]) -> Plan:
    """The same plan for peers of other names."""
    pipelines = tuple(
        msgspec.structs.replace(
            pipeline,
            stages=tuple(
                msgspec.structs.replace(stage, peer_id=names[stage.peer_id])
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    spares = tuple(sorted(names[peer] for peer in plan.spares))
    return msgspec.structs.replace(plan, pipelines=pipelines, spares=spares)


def shape_of_plan(plan: Plan) -> str:
    """The plan for a table: stages of each pipeline, and spares."""
    depths = "+".join(str(len(pipeline.stages)) for pipeline in plan.pipelines)
    return f"{depths}, {len(plan.spares)} spare" if plan.spares else depths


def _run_file(spec: RunSpec, directory: Path, text_lines: int) -> Path:
    """The run's file, with small data, so that their fetch is over before anything is measured."""
    directory.mkdir(parents=True, exist_ok=True)
    text = directory / "text.txt"
    text.write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(text_lines)))
    prepare([text], directory / "data", context=spec.model.context)
    path = directory / "run.json"
    path.write_text(spec.model_dump_json())
    return path


def _wait(swarm: LocalSwarm, first: Child, wanted: int) -> float:
    """Until the founder has committed so many steps in one view, whatever views came before.

    Returns the processors that were used since the view's warm steps. Raises `SystemExit` if a
    daemon ends or nothing happens for long.
    """
    count, progress_s = 0, time.monotonic()
    view, used_s, since_s = -1, 0.0, progress_s
    while True:
        for child in swarm.children:
            if not child.running:
                raise SystemExit(f"{child.name} ended:\n{child.log_tail()}")
        steps = _steps(first)
        if len(steps) > count:
            count, progress_s = len(steps), time.monotonic()
        done = sum(event["view"] == steps[-1]["view"] for event in steps) if steps else 0
        if done >= WARM_STEPS and view != steps[-1]["view"]:
            view, used_s, since_s = steps[-1]["view"], _processor_s(swarm), time.monotonic()
        if done >= wanted:
            return (_processor_s(swarm) - used_s) / (time.monotonic() - since_s)
        if time.monotonic() - progress_s > START_S:
            raise SystemExit(f"no step in {START_S:g} s after {count} steps:\n{first.log_tail()}")
        time.sleep(POLL_S)


def _processor_s(swarm: LocalSwarm) -> float:
    """Processor time so far of all daemons and their p2pd."""
    total_s = 0.0
    for child in swarm.children:
        process = psutil.Process(child.process.pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total_s += times.user + times.system
    return total_s


def _traced(first: Child) -> dict[str, Any]:
    """Spans of all stage holders. One that is late to answer is asked again."""
    for _ in range(TRACE_ATTEMPTS):
        found: dict[str, Any] = call_daemon(
            first.home, f"trace?steps={TRACED_STEPS}", timeout_s=TRACE_S
        )
        if not found["missing"]:
            return found
    raise SystemExit(f"no spans from {', '.join(found['missing'])}")


def _end_at_once(children: Sequence[Child]) -> None:
    """End them without a leave, as nothing of this run is kept."""
    for child in children:
        if child.running:
            child.process.send_signal(signal.SIGKILL)


def _steps(child: Child) -> list[dict[str, Any]]:
    return [
        event for event in _events(child) if event["event"] == "step" and event["loss"] is not None
    ]


def _events(child: Child) -> list[dict[str, Any]]:
    """The events so far; a line may be half written."""
    found = []
    for path in child.home.glob("runs/*/events.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(json.loads(line))
    return found


def _step_s(child: Child) -> list[float]:
    steps = _steps(child)
    last = [event for event in steps if event["view"] == steps[-1]["view"]]
    times = [event["time_s"] for event in last[WARM_STEPS:]]
    return [after - before for before, after in itertools.pairwise(times)]


def _spans(traced: dict[str, Any], names: dict[str, str]) -> dict[str, dict[int, list[Span]]]:
    return {
        names[peer["peer_id"]]: {
            int(step): [Span(*span) for span in spans] for step, spans in peer["steps"].items()
        }
        for peer in traced["peers"]
    }

"""The trace of a simulated step for Perfetto (ui.perfetto.dev) or chrome://tracing.

Format: the Trace Event Format's JSON object with complete events ("X") in microseconds; a process
is a pipeline, a thread a peer; reductions are a process of their own.
"""

from typing import Any

from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.step_time.timeline import StepTime

MOST_EVENTS = 2_000_000


def trace_json(step: StepTime, scenario: Scenario) -> dict[str, Any]:
    """A JSON-serialisable trace of a step that was simulated with `trace=True`."""
    events: list[dict[str, Any]] = []
    for stage in step.stages:
        assert stage.tasklets is not None, "simulate with trace=True"
        process, thread = stage.work.pipeline, stage.work.position
        events.append(name_event("process_name", process, 0, f"pipeline {process}"))
        events.append(name_event("thread_name", process, thread, stage.work.name))
        for backward, microbatch, start_ns, end_ns in stage.tasklets[:MOST_EVENTS]:
            kind = "backward" if backward else "forward"
            event = complete_event(f"{kind} {microbatch}", kind, process, thread, start_ns, end_ns)
            event["args"] = {"microbatch": microbatch}
            events.append(event)
    process = len({stage.work.pipeline for stage in step.stages})
    events.append(name_event("process_name", process, 0, "reductions"))
    for thread, span in enumerate(step.reductions):
        name = f"from layer {span.first_layer}"
        events.append(name_event("thread_name", process, thread, name))
        event = complete_event(
            f"reduce {name}", "reduction", process, thread, span.start_ns, span.end_ns
        )
        event["args"] = {
            "bytes": span.gradient_bytes,
            "holders": [scenario.peers[holder].name for holder in span.holders],
        }
        events.append(event)
    if step.commit_ns:
        start_ns = step.total_ns - step.commit_ns
        events.append(name_event("thread_name", process, len(step.reductions), "commit"))
        events.append(
            complete_event(
                "commit", "commit", process, len(step.reductions), start_ns, step.total_ns
            )
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def complete_event(
    name: str, category: str, process: int, thread: int, start_ns: int, end_ns: int
) -> dict[str, Any]:
    """Something that lasted."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "pid": process,
        "tid": thread,
    }


def name_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """What a process ("process_name") or a thread ("thread_name") is called."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}

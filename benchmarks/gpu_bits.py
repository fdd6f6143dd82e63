"""Bits and speed of codecs, AdamW and replicas on a device in `benchmarks.gpu`."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_stages import StageWork
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.audit_spec import AuditSpec
from p2p_dtfm.train.codecs import Turn, codec_of
from p2p_dtfm.train.kernels import choice
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import learning_rate
from p2p_dtfm.train.stage.device.recorded_runner import RecordedStageRunner
from p2p_dtfm.train.stage.stage_runner import StageRunner

CODECS = ("fp16", "bf16", "int8", "sparse", "sign")
_ROUNDS = 5
_RECORDED_STEPS = 3
_TURN = Turn(7, 3)


@contextlib.contextmanager
def twins() -> Iterator[None]:
    """No kernels are used meanwhile, whatever the device."""
    with mock.patch.object(choice, "launcher_for", lambda device: None):
        yield


def median_s(work: Callable[[], object], finish: Callable[[], None]) -> float:
    """The median seconds of `work`. The first round warms up."""
    times = []
    for _ in range(_ROUNDS + 1):
        finish()
        began_s = time.monotonic()
        work()
        finish()
        times.append(time.monotonic() - began_s)
    return statistics.median(times[1:])


def numbers(count: int, seed: int = 1) -> Tensor:
    """Numbers of many magnitudes, those next to zero too; on the processor."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-40, 10, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, generator=generator), exponents)


def codec_figures(
    spec: RunSpec, device: torch.device, finish: Callable[[], None], count: int
) -> dict[str, Any]:
    """For each codec: whether the device writes and reads the processor's bytes. Also GB of fp32
    encoded each second, by a daemon's own code and by the torch twin."""
    values = numbers(count)
    there = values.to(device)
    found = {}
    for name in CODECS:
        codec = codec_of(name, spec.codecs)
        with twins():
            expected = bytes(codec.encode(values, _TURN))
            decoded = codec.decode(expected, (count,), _TURN)
            twin_s = median_s(lambda codec=codec: codec.encode(there, _TURN), finish)
        ours_s = median_s(lambda codec=codec: codec.encode(there, _TURN), finish)
        read = codec.decode(expected, (count,), _TURN, device).cpu()
        found[name] = {
            "same_bytes": bytes(codec.encode(there, _TURN)) == expected,
            "same_values": torch.equal(read.view(torch.int32), decoded.view(torch.int32)),
            "gb_per_s": round(4e-9 * count / ours_s, 2),
            "twin_gb_per_s": round(4e-9 * count / twin_s, 2),
        }
    return found


def adam_w_figures(
    spec: RunSpec, device: torch.device, finish: Callable[[], None]
) -> dict[str, Any]:
    """One block's steps by a daemon's own code, and by the torch twin."""
    times, digests = {}, {}
    for name, around in (("ours", contextlib.nullcontext()), ("twin", twins())):
        with around:
            state = LayerState.genesis(spec, 1, device)
            gradient = numbers(state.parameter_count).to(device)
            times[name] = median_s(lambda: state.apply(gradient, 0.5, 1e-3), finish)  # noqa: B023
            digests[name] = state.digest()
    return {
        "parameters": state.parameter_count,
        "same_bits": digests["ours"] == digests["twin"],
        "ms": round(1e3 * times["ours"], 3),
        "twin_ms": round(1e3 * times["twin"], 3),
    }


def recording_figures(works: Iterable[StageWork], device: torch.device) -> dict[str, Any]:
    """Whether microbatches come to the same states twice, recorded or not, as the cards of an
    audited run compute them."""
    if device.type != "cuda":
        return {"skipped": "a processor records nothing"}
    same, again = [], []
    for work in works:
        spec = work.spec.model_copy(update={"audit": AuditSpec(rate=0.1)})
        audited = dataclasses.replace(work, spec=spec)
        digests = partial(_digests, audited, device, _genesis(audited))
        plain = digests(records=False)
        again.append(digests(records=False) == plain)
        same.append(digests(records=True) == plain)
    return {"steps": _RECORDED_STEPS, "same_bits": all(same), "repeats_bits": all(again)}


def _genesis(work: StageWork) -> dict[int, bytes]:
    """The initial states. They are drawn once, as drawing takes longer than all that follows."""
    return {layer: LayerState.genesis(work.spec, layer).to_bytes() for layer in work.layers}


def _digests(
    work: StageWork, device: torch.device, genesis: Mapping[int, bytes], records: bool
) -> list[str]:
    states = {n: LayerState.from_bytes(work.spec, n, it, device) for n, it in genesis.items()}
    runner = RecordedStageRunner(work.spec, states, records=records)
    found = _trained(work, work.input_for(device), runner)
    assert runner.repeats_bits and bool(runner.slots) == records
    return found


def _trained(
    work: StageWork, given: tuple[Tensor, Tensor | None], runner: StageRunner
) -> list[str]:
    """Digests of the states after some steps; an output serves as its own gradient."""
    for step in range(_RECORDED_STEPS):
        outputs = [runner.forward(number, *given) for number in range(work.microbatches)]
        for number, output in enumerate(outputs):
            runner.backward(number, output if isinstance(output, Tensor) else None)
        for state in runner.layer_states.values():
            state.apply(state.gradient_vector(), 1.0, learning_rate(work.spec, step))
    return [state.digest() for state in runner.layer_states.values()]


def replica_figures(spec: RunSpec, device: torch.device, steps: int) -> dict[str, Any]:
    """One layer on the device and on the processor, given the same gradients. Returns the first
    step after which their bits differ."""
    there, here = (LayerState.genesis(spec, 1, where) for where in (device, "cpu"))
    differ_at = None
    for step in range(steps):
        gradient = numbers(here.parameter_count, seed=step)
        for state in (there, here):
            state.apply(gradient.to(state.device, copy=True), 0.5, learning_rate(spec, step))
        is_looked_at = step % 100 == 99 or step == steps - 1
        if is_looked_at and there.digest() != here.digest():
            differ_at = step
            break
    return {"steps": steps, "parameters": here.parameter_count, "differ_by_step": differ_at}

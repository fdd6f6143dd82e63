"""Run specs near a given one: which settings may be changed, one or several at a time."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec

Values = dict[str, Any]
"""A run spec as its file states it."""
Read = Callable[[Values, str], RunSpec]
"""Makes a run spec from such values and the name of their file, with the sizes of the layers that
it lists. Raises `UserError`."""

BATCH_FACTORS = (1, 2, 4, 8, 16)
INNER_STEPS = (0, 4, 8, 13, 20, 40)
"""0 stands for one step for all."""
OUTER = {"outer_learning_rate", "outer_momentum"}
INNER_STEPS_OF_FOUR = 13
"""With Muon four replicas were measured with so many inner steps and momentum 0.5, and two with
more and 0.3 (docs/compression.md)."""
REDUCTIONS: Mapping[str, Values] = {
    "fp32": {"reduction": "fp32"},
    "bf16": {"reduction": "bf16"},
    "int8": {"reduction": "int8"},
    "sparse 11 times": {
        "reduction": "sparse",
        "sparse": {"one_in": 1, "keep_percent": 50, "bits": 4},
    },
    "sparse 128 times": {
        "reduction": "sparse",
        "sparse": {"one_in": 8, "keep_percent": 25, "bits": 4},
    },
    "sign": {"reduction": "sign"},
}
OPTIMIZERS = ("adamw", "muon")
BOUNDARIES = (
    ("fp32",),
    ("bf16",),
    ("bf16", "int8"),
    ("bf16", "int8", "subspace"),
    ("rotated6",),
    ("subspace",),
)
"""Codecs of boundaries. Where there are several, the planner chooses for each edge. The loss that
the last two cost by themselves is measured."""
MICROBATCH_FACTORS = (1, 2, 0.5, 0.25)
CONTEXT_FACTORS = (1, 0.5, 0.25)
DEFAULT_DIMENSIONS = ("global-batch", "inner-steps", "reduction", "boundaries", "microbatch")
DIMENSIONS = (*DEFAULT_DIMENSIONS, "optimizer", "context")
STARTS: tuple[Values, ...] = (
    {"global-batch": 8, "inner-steps": 8, "reduction": "sparse 128 times",
     "boundaries": ("bf16", "int8")},
    {"global-batch": 8, "inner-steps": 8, "reduction": "sparse 128 times",
     "boundaries": ("bf16", "int8"), "microbatch": 0.5},
    {"global-batch": 8, "inner-steps": 40, "reduction": "sparse 11 times"},
    {"global-batch": 16, "inner-steps": 13, "reduction": "sign", "optimizer": "muon"},
)  # fmt: skip
"""Changes that pay together where none pays alone."""


class SettingsChoice(NamedTuple):
    """Settings by dimension, as factors or names. Settings that are not listed stay as the run has
    them."""

    settings: tuple[tuple[str, Any], ...]
    values: Values
    spec: RunSpec

    def told(self) -> str:
        """The settings in the words of a run spec."""
        return ", ".join(_told(self.spec, name) for name, _ in self.settings) or "as it is"


def dimensions_in(text: str | None) -> tuple[str, ...]:
    """The dimensions to be changed, as typed. Raises `UserError`."""
    if text is None:
        return DEFAULT_DIMENSIONS
    wanted = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in wanted if name not in DIMENSIONS]
    if unknown or not wanted:
        raise UserError(
            f"--vary {text!r}: {', '.join(unknown) or 'nothing'} cannot be changed",
            f"any of these, separated by commas: {', '.join(DIMENSIONS)}",
        )
    return wanted


def starts(
    values: Values, origin: str, dimensions: tuple[str, ...], read: Read = parse_run_spec
) -> Iterator[SettingsChoice]:
    """The run as it is, then changes that pay only together."""
    yield SettingsChoice((), values, read(values, origin))
    for start in STARTS:
        settings = {name: value for name, value in start.items() if name in dimensions}
        if (made := _made(values, origin, settings, read)) is not None:
            yield made


def neighbours(
    values: Values,
    origin: str,
    choice: SettingsChoice,
    dimensions: Iterable[str],
    read: Read = parse_run_spec,
) -> Iterator[SettingsChoice]:
    """The choices with one setting more, or another value of one."""
    for name in dimensions:
        for value in _values_of(name):
            settings = dict(choice.settings) | {name: value}
            if (made := _made(values, origin, settings, read)) is not None:
                yield made


def _values_of(name: str) -> tuple[Any, ...]:
    return {
        "global-batch": BATCH_FACTORS,
        "inner-steps": INNER_STEPS,
        "reduction": tuple(REDUCTIONS),
        "boundaries": BOUNDARIES,
        "microbatch": MICROBATCH_FACTORS,
        "optimizer": OPTIMIZERS,
        "context": CONTEXT_FACTORS,
    }[name]


def _made(values: Values, origin: str, settings: Values, read: Read) -> SettingsChoice | None:
    """The choice with these settings; None where the run spec does not allow it."""
    made = deepcopy(values)
    try:
        _change(made, settings)
        spec = read(made, origin)
    except (UserError, _OutOfReachError):
        return None
    ordered = tuple((name, settings[name]) for name in DIMENSIONS if name in settings)
    return SettingsChoice(ordered, made, spec)


class _OutOfReachError(Exception):
    """A factor that leads to no whole number."""


def _change(values: Values, settings: Values) -> None:
    """Apply the settings to `values`, with equal tokens in all: fewer, larger steps. The schedule
    counts inner steps where there are any."""
    batch, sync = values["batch"], values.setdefault("sync", {})
    codecs, model = values.setdefault("codecs", {}), values["model"]
    inner_before = _inner_steps(values)
    model["context"] = _times(model["context"], settings.get("context", 1))
    batch["microbatch"] = _times(batch["microbatch"], settings.get("microbatch", 1))
    larger = settings.get("global-batch", 1)
    batch["global_batch"] = _times(batch["global_batch"], larger)
    if "inner-steps" in settings:
        kind = settings.get("optimizer", values["optimizer"].get("kind", "adamw"))
        _agree_after(sync, settings["inner-steps"], kind)
    codecs.update(deepcopy(REDUCTIONS[settings["reduction"]]) if "reduction" in settings else {})
    if "boundaries" in settings:
        codecs["activations"] = codecs["gradients"] = list(settings["boundaries"])
    values["total_steps"] = math.ceil(values["total_steps"] / larger)
    for section, key in (("evaluation", "every_steps"), ("checkpoint", "every_steps")):
        if key in values.get(section, {}):
            values[section][key] = max(1, values[section][key] // larger)
    optimizer = values["optimizer"]
    if "optimizer" in settings:
        optimizer["kind"] = settings["optimizer"]
    for key in ("warmup_steps", "decay_steps"):
        if key in optimizer:
            scaled = optimizer[key] * _inner_steps(values) / (inner_before * larger)
            optimizer[key] = math.ceil(scaled)
    for section in ("sync", "codecs"):
        if not values[section]:
            del values[section]


def _agree_after(sync: Values, inner_steps: int, optimizer: str) -> None:
    """Set the inner steps. If that turns local steps on, also set the outer step that was measured
    with so many, unless the file states one."""
    if not inner_steps:
        sync["mode"] = "every_step"
        return
    if sync.get("mode") != "local" and not OUTER & sync.keys():
        momentum = 0.0
        if optimizer == "muon":
            momentum = 0.5 if inner_steps <= INNER_STEPS_OF_FOUR else 0.3
        sync |= {"outer_learning_rate": 1.0, "outer_momentum": momentum}
    sync |= {"mode": "local", "inner_steps": inner_steps}


def _inner_steps(values: Values) -> int:
    """Optimizer steps between two reductions."""
    sync = values.get("sync", {})
    return int(sync.get("inner_steps", 8)) if sync.get("mode") == "local" else 1


def _times(value: int, factor: float) -> int:
    product = value * factor
    if product < 1 or product != int(product):
        raise _OutOfReachError
    return int(product)


def _told(spec: RunSpec, name: str) -> str:
    sparse = spec.codecs.sparse
    local = spec.sync.mode == "local"
    reduction: str = spec.codecs.reduction
    if reduction == "sparse":
        reduction += f" (one in {sparse.one_in}, {sparse.keep_percent}%, {sparse.bits} bits)"
    return {
        "global-batch": f"global batch {spec.batch.global_batch}",
        "inner-steps": counted(spec.sync.inner_steps, "inner step")
        if local
        else "one step for all",
        "reduction": f"reduction {reduction}",
        "boundaries": f"boundaries {' or '.join(spec.codecs.activations)}",
        "optimizer": f"optimizer {spec.optimizer.kind}",
        "microbatch": f"microbatch {spec.batch.microbatch}",
        "context": f"context {spec.model.context}",
    }[name]

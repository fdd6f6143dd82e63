"""A run lists its layers one by one: their kinds, their sizes, and what a stage makes of them."""

import itertools
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.layers.listed import LayerSizes
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.sim.scenario.files import packaged_configs, read_run_spec
from p2p_dtfm.train.data import ByteTokenizer
from p2p_dtfm.train.hugging_face.export import model_in
from p2p_dtfm.train.model.checkpoint import checkpoint_directory, load_layer
from p2p_dtfm.train.model.generate import generate
from p2p_dtfm.train.model.gpt import build_layer, layer_count, layer_entries
from p2p_dtfm.train.model.kinds import registry
from p2p_dtfm.train.model.kinds.kind import Costs, LayerKind, Place, Shape
from p2p_dtfm.train.model.kinds.registry import with_sizes
from p2p_dtfm.train.model.layer_state import LayerState, state_bytes_limit
from p2p_dtfm.train.model.optimizer import apply_outcome
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.stage.emulated import EmulatedStageRunner, emulated_device
from p2p_dtfm.train.stage.local_steps import LocalSteps
from p2p_dtfm.train.stage.measure import measure_device
from p2p_dtfm.train.stage.private_memory import PrivateMemory
from p2p_dtfm.train.stage.stage_runner import StageRunner
from tests.train.saved_layers import save_layers

Batches = Callable[[int, int], tuple[Tensor, Tensor]]

VALUES = {
    "name": "test",
    "seed": 7,
    "total_steps": 20,
    "model": {"layers": 4, "width": 16, "heads": 2, "context": 12, "vocabulary": 31},
    "batch": {"global_batch": 8, "microbatch": 2},
    "optimizer": {"peak_learning_rate": 0.01, "warmup_steps": 2, "clip_norm": 0.5},
    "evaluation": {"sequences": 4},
}
MIXED = [
    {"kind": "embedding"},
    {"kind": "block"},
    {"kind": "projection", "width": 24},
    {"kind": "block", "heads": 3, "feed_forward_width": 40},
    {"kind": "projection", "width": 8},
    {"kind": "head"},
]
PICTURES = [
    {"kind": "image", "height": 3, "width": 4, "channels": 4, "white": 30},
    {"kind": "convolution"},
    {"kind": "convolution", "channels": 6, "stride": 2},
    {"kind": "convolution"},
    {"kind": "convolution", "channels": 2},
    {"kind": "classifier", "classes": 31},
]


def run_of(layers: list[dict[str, object]], **changes: object) -> RunSpec:
    model = VALUES["model"] | {"layers": len(layers) - 2}  # type: ignore[operator]
    return with_sizes(parse_run_spec(VALUES | {"model": model, "layers": layers} | changes, "t"))


def losses_of_stages(
    spec: RunSpec,
    cuts: tuple[int, ...],
    steps: int,
    batch: Batches,
) -> Iterator[float]:
    """The losses of two or more stages, whose tensors the test hands on."""
    ends = (0, *cuts, layer_count(spec))
    states = {layer: LayerState.genesis(spec, layer) for layer in range(layer_count(spec))}
    stages = [
        StageRunner(spec, {n: states[n] for n in range(first, end)}, recompute=first > 0)
        for first, end in itertools.pairwise(ends)
    ]
    for step in range(steps):
        loss = 0.0
        for number in range(spec.microbatches_per_step):
            stream, targets = batch(step, number)
            for stage in stages[:-1]:
                stream = stage.forward(number, stream)
                shape = spec.boundary_shape(max(stage.layer_states) + 1)
                assert tuple(stream.shape) == shape
            loss += stages[-1].forward(number, stream, targets)
            gradient = None
            for stage in reversed(stages):
                gradient = stage.backward(number, gradient)
        norm = (
            sum(float(state.gradient.double().square().sum()) for state in states.values()) ** 0.5
        )
        for state in states.values():
            apply_outcome(spec, state, state.gradient.clone(), step, norm)
        yield loss / spec.tokens_per_step


@pytest.mark.parametrize(("layers", "cuts"), [(MIXED, (2, 3)), (PICTURES, (1, 3, 5))])
def test_stages_of_unlike_layers_equal_the_plain_loop(
    layers: list[dict[str, object]],
    cuts: tuple[int, ...],
    toy_batch: Batches,
) -> None:
    spec = run_of(layers)
    plain = list(ReferenceRun(spec, toy_batch).losses(6))
    cut = list(losses_of_stages(spec, cuts, 6, toy_batch))
    assert max(abs(a - b) for a, b in zip(plain, cut, strict=True)) < 1e-4
    assert plain[-1] != plain[0]


@pytest.mark.parametrize("layers", [MIXED, PICTURES])
def test_sizes_are_those_of_the_modules(layers: list[dict[str, object]]) -> None:
    spec = run_of(layers)
    work = workload_of(spec)
    for layer in range(layer_count(spec)):
        module = build_layer(spec, layer)
        count = sum(parameter.numel() for parameter in module.parameters())
        assert work.cost(layer).parameter_count == count
        assert [name for name, _ in layer_entries(spec, layer)] == [
            name for name, _ in module.named_parameters()
        ]
        if layer + 1 < layer_count(spec):
            shape = (2, 12) if layer == 0 else spec.boundary_shape(layer)
            entry = torch.zeros(shape, dtype=torch.int64 if layer == 0 else torch.float32)
            for parameter in module.parameters():
                parameter.data.fill_(0.1)
            assert tuple(module(entry).shape) == spec.boundary_shape(layer + 1)


def test_each_distinct_layer_is_measured_once() -> None:
    spec = run_of([MIXED[0], MIXED[1], MIXED[1], MIXED[2], MIXED[4], MIXED[5]])
    unlike = workload_of(spec).unlike
    assert unlike is not None
    assert unlike.order == (0, 1, 1, 2, 3, 4)
    seen: list[tuple[int, int]] = []
    device = measure_device(spec, progress=lambda *told: seen.append(told))
    assert len(device.unlike) == 5
    assert all(timing.forward_ns > 0 and timing.backward_ns > 0 for timing in device.unlike)
    assert seen[-1] == (5, 5)
    assert device.embedding == device.unlike[0]
    assert device.head == device.unlike[4]


def test_an_emulated_device_has_boundaries_of_the_same_shapes() -> None:
    spec = run_of(PICTURES)
    device = emulated_device(spec, 10**12, 1 << 30)
    assert len(device.unlike) == 6
    states = {layer: LayerState.genesis(spec, layer) for layer in (1, 2)}
    runner = EmulatedStageRunner(device, spec, states)
    answer = runner.forward(0, torch.zeros(spec.boundary_shape(1)))
    assert isinstance(answer, Tensor)
    assert tuple(answer.shape) == spec.boundary_shape(3)
    gradient = runner.backward(0, answer)
    assert gradient is not None
    assert tuple(gradient.shape) == spec.boundary_shape(1)


@pytest.mark.parametrize(
    ("place", "layer", "why"),
    [
        (1, {"kind": "unheard-of"}, "no such kind is installed"),
        (1, {"kind": "block", "depth": 3}, "no option 'depth'"),
        (1, {"kind": "block", "heads": 3}, "must divide"),
        (1, {"kind": "block", "heads": "many"}, "whole number"),
        (1, {"kind": "projection"}, "needs the width"),
        (1, {"kind": "projection", "width": 1 << 39}, "whole number from 1"),
        (1, {"kind": "embedding"}, "comes first"),
        (0, {"kind": "block"}, "cannot come first"),
        (1, {"kind": "convolution"}, "channels by height by width"),
        (0, {"kind": "image", "height": 5, "width": 5}, "must be model.context"),
    ],
)
def test_a_layer_that_cannot_stand_there_is_refused(
    place: int, layer: dict[str, object], why: str
) -> None:
    layers = [*MIXED]
    layers[place] = layer
    with pytest.raises(UserError, match=why) as refused:
        run_of(layers)
    assert refused.value.fixes


@pytest.mark.parametrize("last", ["classifier", "head"])
def test_data_that_ask_for_an_answer_which_the_last_layer_has_not_are_named(last: str) -> None:
    """The data are, say, text in place of pictures, as `data.source` says by default."""
    answer = torch.zeros((2, 5) if last == "classifier" else (2, 12, 5))
    kind, targets = registry.SHIPPED[last], torch.full((2, 12), 4)
    kind.loss_sum(answer, targets, 0.0)
    targets[:, 3] = -100
    targets[1, -1] = 101
    with pytest.raises(UserError, match="the answer 101, and its last layer has 5") as refused:
        kind.loss_sum(answer, targets, 0.0)
    assert "data.source" in " ".join(refused.value.fixes)


def test_stated_sizes_must_be_what_the_kind_comes_to() -> None:
    spec = run_of(MIXED)
    lying = LayerSizes(boundary=(12, 1), parameters=1, saved_values=1, forward_flops=1)
    layers = list(spec.layers)
    layers[1] = layers[1].model_copy(update={"sizes": lying})
    with pytest.raises(UserError, match="layer 1 of the run test is said to come to"):
        with_sizes(spec.model_copy(update={"layers": tuple(layers)}))
    assert with_sizes(spec) == spec


def test_large_layers_are_refused_without_being_allocated() -> None:
    wide = {"kind": "projection", "width": 65536}
    with pytest.raises(UserError, match="too large"):
        run_of(
            [MIXED[0], {"kind": "projection", "width": 1 << 16}, wide, MIXED[5]],
            model=VALUES["model"] | {"context": 1 << 20, "layers": 2},  # type: ignore[operator]
        )


def test_sizes_are_worked_out_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for pictures, too: nothing that comes along leaves torch's meta device."""
    devices: set[str] = set()
    build = registry.SHIPPED["classifier"].build, registry.SHIPPED["convolution"].build

    def seen(module: nn.Module) -> nn.Module:
        devices.update(parameter.device.type for parameter in module.parameters())
        return module

    for kind, made in zip(("classifier", "convolution"), build, strict=True):
        monkeypatch.setattr(
            type(registry.SHIPPED[kind]), "build", lambda self, place, made=made: seen(made(place))
        )
    run_of(PICTURES)
    assert devices == {"meta"}


@pytest.mark.parametrize("name", ["mixed-width", "digits"])
def test_a_shipped_run_of_listed_layers_is_what_its_file_says(name: str) -> None:
    values = tomllib.loads((packaged_configs() / f"{name}.toml").read_text())
    spec = with_sizes(read_run_spec(name))
    assert len(values["layers"]) == layer_count(spec)
    assert RunSpec.from_canonical_bytes(spec.canonical_bytes()) == spec


def test_a_checkpoint_is_read_again_but_neither_exported_nor_writes(tmp_path: Path) -> None:
    spec = run_of(PICTURES)
    states = [LayerState.genesis(spec, layer) for layer in range(layer_count(spec))]
    save_layers(tmp_path, spec, 0, 0, [state.snapshot() for state in states])
    directory = checkpoint_directory(tmp_path, 0)
    assert load_layer(directory, 2).digest() == states[2].digest()
    with pytest.raises(UserError, match="export knows GPTs"):
        model_in(directory)
    with pytest.raises(UserError, match="generate knows GPTs"):
        generate(directory, ByteTokenizer(), "a", 1, 0.7, 1)


class Doubling(LayerKind):
    """A layer kind of somebody else's."""

    options = frozenset({"times"})

    def boundary(self, place: Place) -> Shape:
        return place.require_entry("tokens", "width")

    def build(self, place: Place) -> nn.Module:
        return _Times(place.number("times", 2))

    def costs(self, place: Place) -> Costs:
        tokens, width = place.entry
        return Costs(tokens * width, tokens * width)


class _Times(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.shift = nn.Parameter(torch.empty(1))

    def forward(self, stream: Tensor) -> Tensor:
        return self.times * stream + self.shift


class Buffered(Doubling):
    def build(self, place: Place) -> nn.Module:
        return nn.BatchNorm1d(12)


class Broken(Doubling):
    def costs(self, place: Place) -> Costs:
        return self.nothing  # type: ignore[attr-defined, no-any-return]


class Wrong(Doubling):
    """A layer kind that passes on another shape than it says."""

    def boundary(self, place: Place) -> Shape:
        tokens, width = place.entry
        return tokens, width - 1


class Many(Doubling):
    """A layer kind with many modules, as of many experts."""

    def build(self, place: Place) -> nn.Module:
        return nn.Sequential(*(_Times(1) for _ in range(place.number("times", 2))))


class Named(Doubling):
    """A layer kind some of whose matrices are called as some of ours."""

    def build(self, place: Place) -> nn.Module:
        made = nn.Module()
        made.inner = nn.Module()
        for module, name in ((made.inner, "wide"), (made.inner, "narrow"), (made, "plain")):
            module.register_parameter(name, nn.Parameter(torch.empty(64, 25)))
        made.attention_output = nn.Linear(25, 64, bias=False)
        return made


class Fixed(Doubling):
    """A layer kind with a matrix that is not trained, and a number that is."""

    def build(self, place: Place) -> nn.Module:
        return _Fixed(place.entry[1])


class _Fixed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(width, width), requires_grad=False)
        self.change = nn.Parameter(torch.empty(()))

    def forward(self, stream: Tensor) -> Tensor:
        return stream @ self.matrix * (1.0 + self.change)


DOUBLING, BUFFERED, NO_KIND, BROKEN = Doubling(), Buffered(), "a word", Broken()
MANY, NAMED, WRONG, FIXED = Many(), Named(), Wrong(), Fixed()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    points = [
        EntryPoint(name, f"{__name__}:{value}", registry.GROUP)
        for name, value in [
            ("doubling", "DOUBLING"),
            ("buffered", "BUFFERED"),
            ("many", "MANY"),
            ("named", "NAMED"),
            ("wrong", "WRONG"),
            ("fixed", "FIXED"),
            ("no-kind", "NO_KIND"),
            ("broken", "BROKEN"),
            ("gone", "NOT_THERE"),
            ("block", "NO_KIND"),
            ("twice", "DOUBLING"),
            ("twice", "BUFFERED"),
        ]
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry.kind_named.cache_clear()
    yield
    registry.kind_named.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_kind_that_another_package_registers_trains(
    toy_batch: Batches,
) -> None:
    layers = [MIXED[0], {"kind": "doubling", "times": 3}, {"kind": "block"}, MIXED[5]]
    spec = run_of(layers)
    plain = list(ReferenceRun(spec, toy_batch).losses(3))
    assert list(losses_of_stages(spec, (2,), 3, toy_batch)) == pytest.approx(plain, abs=1e-4)
    assert measure_device(spec).unlike[1].forward_ns > 0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("buffered", "has buffers"),
        ("no-kind", "no instance of LayerKind"),
        ("broken", f"{__name__}.Broken raises AttributeError: 'Broken' object has no"),
        ("gone", f"'gone' cannot be loaded: {__name__}:NOT_THERE raises AttributeError"),
        ("twice", "two packages"),
        ("missing", "doubling"),
    ],
)
def test_a_registered_kind_that_cannot_be_used_is_refused(kind: str, why: str) -> None:
    with pytest.raises(UserError) as refused:
        run_of([MIXED[0], {"kind": kind}, MIXED[5]])
    assert why in str(refused.value.cause) + " ".join(refused.value.fixes)


@pytest.mark.usefixtures("installed")
def test_a_layer_may_have_hundreds_of_tensors_but_no_more_than_a_file_can_name() -> None:
    spec = run_of([MIXED[0], {"kind": "many", "times": 500}, MIXED[5]])
    state = LayerState.genesis(spec, 1)
    assert LayerState.from_bytes(spec, 1, state.to_bytes()).digest() == state.digest()
    assert len(state.to_bytes()) <= state_bytes_limit(spec, 1)
    with pytest.raises(UserError, match="5000 tensors"):
        run_of([MIXED[0], {"kind": "many", "times": 5000}, MIXED[5]])


@pytest.mark.usefixtures("installed")
def test_all_matrices_of_a_kind_begin_with_its_deviation_whatever_they_are_called() -> None:
    spec = run_of([MIXED[0], {"kind": "named"}, {"kind": "block"}, MIXED[5]])
    found = LayerState.genesis(spec, 1).module.named_parameters()
    deviations = {name: float(matrix.detach().std()) for name, matrix in found}
    assert len(deviations) == 4
    assert deviations == pytest.approx(dict.fromkeys(deviations, 0.2), rel=0.1)


@pytest.mark.usefixtures("installed")
def test_what_a_kind_does_not_train_stays_as_it_is(toy_batch: Batches) -> None:
    """Its matrices decayed, and a run of one process has them as they were."""
    fast = VALUES["optimizer"] | {"weight_decay": 10.0}  # type: ignore[operator]
    spec = run_of([MIXED[0], {"kind": "fixed"}, MIXED[5]], optimizer=fast)
    plain = ReferenceRun(spec, toy_batch)
    losses = list(plain.losses(4))
    assert list(losses_of_stages(spec, (1,), 4, toy_batch)) == pytest.approx(losses, abs=1e-4)
    state = LayerState.genesis(spec, 1)
    before = state.module.get_parameter("matrix").detach().clone()
    assert torch.equal(before, plain.model[1].get_parameter("matrix"))
    state.apply(torch.ones_like(state.parameters), 1.0, 0.01)  # as some codecs tell of zeros
    assert torch.equal(before, state.module.get_parameter("matrix"))
    assert float(state.module.get_parameter("change").detach()) == pytest.approx(-0.01, rel=1e-3)


@pytest.mark.usefixtures("installed")
def test_inner_steps_leave_what_a_kind_does_not_train() -> None:
    fast = VALUES["optimizer"] | {"weight_decay": 10.0}  # type: ignore[operator]
    local = {"mode": "local", "inner_steps": 2}
    spec = run_of([MIXED[0], {"kind": "fixed"}, MIXED[5]], optimizer=fast, sync=local)
    state = LayerState.genesis(spec, 1)
    steps = LocalSteps(spec, {1: state}, PrivateMemory())
    steps.begin(0)
    steps.inner_step(0, 1)
    steps.finish(1)
    assert not state.gradient.any(), "of what is not trained there is no difference"


@pytest.mark.usefixtures("installed")
def test_a_single_number_begins_as_a_vector_does() -> None:
    spec = run_of([MIXED[0], {"kind": "fixed"}, MIXED[5]])
    state = LayerState.genesis(spec, 1)
    assert float(state.module.get_parameter("change").detach()) == 0.0
    assert LayerState.from_bytes(spec, 1, state.to_bytes()).digest() == state.digest()


@pytest.mark.usefixtures("installed")
def test_a_kind_that_gives_on_another_shape_than_it_says_is_found_before_it_trains() -> None:
    spec = run_of([MIXED[0], {"kind": "wrong"}, MIXED[5]])
    with pytest.raises(UserError, match=r"'wrong' gives on \[12, 16\] .* says \[12, 15\]"):
        measure_device(spec)


@pytest.mark.usefixtures("installed")
def test_nobody_takes_the_name_of_a_kind_that_comes_along() -> None:
    assert registry.kind_named("block") is registry.SHIPPED["block"]

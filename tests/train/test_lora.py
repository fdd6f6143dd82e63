"""Adapters over a frozen model: what they compute, what travels, and what planning counts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.core.protocol.sections.lora_spec import LoraSpec, adapted_matrices
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from p2p_dtfm.train.model.gpt import build_layer, layer_count
from p2p_dtfm.train.model.initial_state import attach_base, initial_layer_path, initial_layer_state
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.lora.adapted import has_base
from p2p_dtfm.train.model.reference import ReferenceRun
from tests.core.builders import run_spec
from tests.models.families import losses_of, made
from tests.train.test_parity import TWO_BY_TWO, HandWired

EVERY = ("query", "key", "value", "output", "gate", "up", "down")
THEIRS = {"output": "o_proj", "query": "q_proj", "key": "k_proj", "value": "v_proj"}
THEIRS |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Reference(nn.Module):
    """An adapter as its authors describe it, beside a linear layer of transformers'."""

    def __init__(self, plain: nn.Linear, narrow: Tensor, wide: Tensor, scale: float) -> None:
        super().__init__()
        self.plain, self.scale = plain, scale
        self.a, self.b = nn.Parameter(narrow.clone()), nn.Parameter(wide.clone())

    def forward(self, entry: Tensor) -> Tensor:
        return self.plain(entry) + (entry @ self.a.T @ self.b.T) * self.scale


def with_adapters(model: PreTrainedModel, states: list[LayerState]) -> PreTrainedModel:
    """The model frozen, with adapters of the same values as ours."""
    lora = states[0].spec.lora
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer, state in enumerate(states[1:-1]):
        for matrix in adapted_matrices(state.spec.model, lora):
            block = model.model.layers[layer]
            owner = block.mlp if matrix.target in ("gate", "up", "down") else block.self_attn
            plain = getattr(owner, THEIRS[matrix.target])
            ours = state.module.get_submodule(f"{matrix.part}.{matrix.target}")
            adapter = Reference(plain, ours.narrow.data, ours.wide.data, lora.alpha / lora.rank)
            setattr(owner, THEIRS[matrix.target], adapter)
    return model


def imported(directory: Path, lora: LoraSpec, case: str = "llama3", **sizes: object) -> RunSpec:
    model = made(case, vocab_size=97, max_position_embeddings=32, **sizes)
    model.save_pretrained(directory / "hf")
    training = Training("python-standard-library", 20, 8, 2, 3e-3, lora=lora)
    return import_hugging_face(directory / "hf", directory / "in", "", training)


def first_states(directory: Path, spec: RunSpec) -> list[LayerState]:
    folder = directory / "in" / "initial"
    return [
        initial_layer_state(spec, layer, initial_layer_path(folder, layer))
        for layer in range(layer_count(spec))
    ]


def batch_of(spec: RunSpec):
    """A text that can be learnt: each token follows from the one before."""

    def batch(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        shape = (spec.batch.microbatch, 1)
        first = torch.randint(0, 97, shape, generator=generator)
        tokens = (first + 3 * torch.arange(spec.model.context + 1)) % 97
        return tokens[:, :-1], tokens[:, 1:]

    return batch


class Wired(HandWired):
    """Stages wired by hand; what is frozen comes from the files of the import."""

    def __init__(self, directory: Path, spec: RunSpec, recompute: bool) -> None:
        super().__init__(spec, TWO_BY_TWO, batch_of(spec), recompute)
        for runner in self.runners.values():
            for layer, state in runner.layer_states.items():
                given = initial_layer_state(
                    spec, layer, initial_layer_path(directory / "in" / "initial", layer)
                )
                state._module = given.module
                state.compute_with(state.parameters)


def wired_losses(directory: Path, spec: RunSpec, steps: int) -> list[float]:
    """The losses of four stages in one process."""
    wired = Wired(directory, spec, recompute=False)
    return [wired.step(step) for step in range(steps)]


@pytest.mark.parametrize("targets", [EVERY, ("key", "down")])
def test_two_by_two_stages_train_adapters_as_one_machine_does(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    lora = LoraSpec(rank=4, alpha=8, targets=targets)
    spec = imported(tmp_path, lora, num_hidden_layers=3)
    states = first_states(tmp_path, spec)
    theirs = with_adapters(LlamaForCausalLM.from_pretrained(tmp_path / "hf"), states)
    expected = losses_of(theirs, spec, batch_of(spec), 20)
    measured = wired_losses(tmp_path, spec, 20)
    assert max(abs(a - b) for a, b in zip(measured, expected, strict=True)) < 1e-4
    assert measured[-1] < measured[0] - 0.02
    given = lambda layer: initial_layer_path(tmp_path / "in" / "initial", layer)  # noqa: E731
    plain = list(ReferenceRun(spec, batch_of(spec), given=given).losses(3))
    assert max(abs(a - b) for a, b in zip(plain, expected, strict=False)) < 1e-4


def test_embedding_and_head_have_one_element_and_a_tied_head_may_lie_elsewhere(
    tmp_path: Path,
) -> None:
    lora = LoraSpec(rank=4, targets=("query",))
    spec = imported(tmp_path, lora, tie_word_embeddings=True)
    workload = workload_of(spec)
    for state in first_states(tmp_path, spec):
        cost = workload.cost(state.layer)
        assert state.parameter_count == cost.parameter_count
        frozen = sum(tensor.numel() for tensor in state.module.buffers())
        assert cost.state_bytes == 4 * (frozen + 4 * cost.parameter_count)
    assert workload.embedding.parameter_count == workload.head.parameter_count == 1
    assert not workload.one_stage and not workload.splits_backwards


def test_a_state_on_its_way_needs_no_model(tmp_path: Path) -> None:
    spec = imported(tmp_path, LoraSpec(rank=4, targets=EVERY))
    state = first_states(tmp_path, spec)[1]
    again = LayerState.from_bytes(spec, 1, state.to_bytes())
    assert not has_base(again.module) and again.digest() == state.digest()
    attach_base(again, initial_layer_path(tmp_path / "in" / "initial", 1))
    stream = torch.randn(1, 5, spec.model.width)
    assert torch.equal(again.module(stream), state.module(stream))


def test_what_is_reduced_of_a_wide_model_is_a_hundredth(tmp_path: Path) -> None:
    """For a Llama of width 512: what all gradients take, and what those of adapters do."""
    model = {"preset": "llama", "layers": 8, "width": 512, "heads": 8, "context": 128}
    values = {
        "name": "wide",
        "total_steps": 1,
        "model": model | {"vocabulary": 32000, "initial": "0" * 64},
        "batch": {"global_batch": 8, "microbatch": 2},
        "optimizer": {"peak_learning_rate": 1e-4},
    }
    full = parse_run_spec(values, "test")
    adapted = parse_run_spec(values | {"lora": {"rank": 8}}, "test")

    def reduced_bytes(spec: RunSpec) -> int:
        states = [build_layer(spec, layer, "meta") for layer in range(layer_count(spec))]
        counted = sum(4 * p.numel() for state in states for p in state.parameters())
        workload = workload_of(spec)
        costs = [workload.cost(layer) for layer in range(workload.layer_count)]
        assert sum(map(workload.gradient_wire_bytes, costs)) == counted
        return counted

    assert reduced_bytes(adapted) <= reduced_bytes(full) / 100
    assert adapted.digest() != full.digest()


@pytest.mark.parametrize(
    ("lora", "changes", "reason"),
    [
        ({"rank": 4, "dropout": 0.1}, {}, "dropout must be 0"),
        ({"rank": 4, "targets": ["query", "query"]}, {}, "twice"),
        ({"alpha": 4.0}, {}, "rank must be at least 1"),
        ({"rank": 4, "targets": ["gate"]}, {}, '"swiglu" has one'),
        ({"rank": 4}, {"optimizer": {"peak_learning_rate": 1e-3, "kind": "muon"}}, "muon"),
        ({"rank": 4}, {"model": run_spec().model.model_dump() | {"initial": ""}}, "given"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(
    lora: dict, changes: dict, reason: str
) -> None:
    values = run_spec().model_dump()
    values["model"] |= {"initial": "0" * 64}
    with pytest.raises(UserError, match=reason):
        parse_run_spec(values | {"lora": lora} | changes, "test")

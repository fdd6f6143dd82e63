"""Choices of a recipe: when the rate falls, what decays, z-loss, and documents kept apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.train.data import ByteTokenizer
from p2p_dtfm.train.model.gpt import build_layer, document_numbers, initialise_layer, token_loss_sum
from p2p_dtfm.train.model.optimizer import inner_learning_rate, learning_rate
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.updates.layer_update import is_spared
from tests.train.test_parity import STAGE_PER_LAYER, TWO_BY_TWO, HandWired

Batch = Callable[[int, int], tuple[Tensor, Tensor]]
STEPS = 4


def changed(spec: RunSpec, **sections: dict[str, Any]) -> RunSpec:
    values = spec.model_dump(mode="python")
    for section, keys in sections.items():
        values[section] |= keys
    return parse_run_spec(values, "test")


def test_warm_up_stable_decay(spec: RunSpec) -> None:
    wsd = changed(spec, optimizer={"schedule": "wsd", "final_learning_rate": 0.002})
    rates = [learning_rate(wsd, step) for step in range(25)]
    assert rates[:2] == [0.005, 0.01]
    assert rates[2:17] == [0.01] * 15, "a fifth of 20 steps is left for the fall"
    assert rates[16:22] == pytest.approx([0.01, 0.008, 0.006, 0.004, 0.002, 0.002])
    longer = changed(wsd, optimizer={"decay_steps": 10})
    assert [learning_rate(longer, step) for step in (10, 15, 20)] == [0.01, 0.006, 0.002]
    local = changed(wsd, sync={"mode": "local", "inner_steps": 2})
    inner = [inner_learning_rate(local, step, place) for step in range(20) for place in (0, 1)]
    assert inner[2:33] == [0.01] * 31 and inner[36] == pytest.approx(0.006)


def test_what_is_not_chosen_is_not_in_the_name_of_a_run(spec: RunSpec) -> None:
    stated = spec.canonical_bytes()
    for word in (b"schedule", b"decay_steps", b"decay_embeddings", b"z_loss", b"packing"):
        assert word not in stated
    chosen = changed(
        spec,
        optimizer={"schedule": "wsd", "decay_steps": 3, "decay_embeddings": False, "z_loss": 1e-4},
        data={"packing": "documents"},
    )
    assert RunSpec.from_canonical_bytes(chosen.canonical_bytes()) == chosen
    assert chosen.digest() != spec.digest()


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("optimizer", {"decay_steps": 3}, "decay_steps counts only with"),
        ("optimizer", {"schedule": "linear"}, "schedule"),
        ("optimizer", {"z_loss": -1.0}, "z_loss"),
        ("data", {"end_of_document": 3}, "end_of_document counts only with"),
    ],
)
def test_choices_that_mean_nothing(spec: RunSpec, section: str, keys: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        changed(spec, **{section: keys})


def test_z_loss_is_in_the_gradient_and_not_in_the_loss() -> None:
    logits = torch.randn(2, 3, 7, requires_grad=True)
    targets = torch.randint(7, (2, 3))
    told = token_loss_sum(logits, targets, 0.1)
    plain = functional.cross_entropy(logits.view(6, 7), targets.view(6), reduction="sum")
    assert told.item() == plain.item()
    (found,) = torch.autograd.grad(told, logits)
    wanted = plain + 0.1 * (torch.exp(logits).sum(dim=2).log() ** 2).sum()
    (expected,) = torch.autograd.grad(wanted, logits)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("plan", "recompute"),
    [(TWO_BY_TWO, False), (STAGE_PER_LAYER, True)],
    ids=["two by two", "five stages, forwards again"],
)
def test_all_together_equal_the_plain_loop(
    spec: RunSpec, toy_batch: Batch, plan: Any, recompute: bool
) -> None:
    run = changed(
        spec,
        optimizer={
            "schedule": "wsd", "decay_embeddings": False, "z_loss": 0.05, "weight_decay": 0.5
        },
        data={"packing": "documents", "end_of_document": 3},
    )  # fmt: skip
    assert any(int((toy_batch(0, n)[0] == 3).sum()) > 1 for n in range(4)), "documents end"
    swarm = HandWired(run, plan, toy_batch, recompute)
    expected = list(ReferenceRun(run, toy_batch).losses(STEPS))
    assert [swarm.step(step) for step in range(STEPS)] == pytest.approx(expected, abs=1e-5)
    for section, keys in (
        ("optimizer", {"z_loss": 0.0}),
        ("optimizer", {"decay_embeddings": True}),
        ("data", {"packing": "plain", "end_of_document": -1}),
    ):
        other = list(ReferenceRun(changed(run, **{section: keys}), toy_batch).losses(STEPS))
        assert max(abs(a - b) for a, b in zip(expected, other, strict=True)) > 1e-4, keys


def test_a_tied_head_is_an_embedding(spec: RunSpec) -> None:
    spared = changed(spec, optimizer={"decay_embeddings": False})
    assert [is_spared(spared, layer) for layer in range(5)] == [True] + [False] * 4
    tied = changed(spared, model={"tied_head": True})
    assert [is_spared(tied, layer) for layer in range(5)] == [True, False, False, False, True]
    assert not any(is_spared(spec, layer) for layer in range(5))


def test_a_document_does_not_see_the_one_before(spec: RunSpec) -> None:
    """Documents packed one after another come out as each does by itself."""
    run = changed(
        spec,
        model={"position": "rope", "context": 16},
        data={"packing": "documents", "end_of_document": 0},
    )
    layers = [build_layer(run, layer) for layer in range(5)]
    for layer, module in enumerate(layers):
        initialise_layer(module, run, layer)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(8)

    def logits(tokens: Tensor, documents: Tensor | None) -> Tensor:
        stream = tokens
        for layer, module in enumerate(layers):
            inside = documents is not None and 0 < layer < 4
            stream = module(stream, documents=documents) if inside else module(stream)
        return stream

    tokens = torch.tensor([[5, 6, 7, 0, 9, 8, 7, 6, 0, 0, 3, 2], [1] * 12])
    documents = document_numbers(tokens, 0)
    assert documents[0].tolist() == [0] * 4 + [1] * 5 + [2] + [3] * 2
    assert documents[1].tolist() == [0] * 12
    packed = logits(tokens, documents)
    alone = torch.cat(
        [logits(tokens[:1, a:b], None) for a, b in ((0, 4), (4, 9), (9, 10), (10, 12))], 1
    )
    assert torch.allclose(packed[:1], alone, atol=1e-4)
    assert torch.allclose(packed[1:], logits(tokens[1:], None), atol=1e-5)
    assert (packed[:1] - logits(tokens[:1], None)).abs().max() > 0.1, "else nothing was shown"


def test_the_end_of_a_document_is_one_token() -> None:
    assert ByteTokenizer().end_of_document == 0

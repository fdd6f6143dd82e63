"""A head whose loss is computed in chunks of tokens computes what the plain one does."""

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.layers import head_chunks
from p2p_dtfm.core.protocol.layers.head_chunks import head_in_chunks, head_values
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.train.model.deferred_gradients import WeightGradients, leave_weight_gradients
from p2p_dtfm.train.model.gpt import token_loss_sum
from p2p_dtfm.train.model.kinds import chunked_head
from p2p_dtfm.train.model.kinds.chunked_head import chunked_loss_sum
from p2p_dtfm.train.model.kinds.ends import Head
from p2p_dtfm.train.model.reference import ReferenceRun
from tests.core.builders import run_spec
from tests.train.test_parity import ONE_PEER, TWO_BY_TWO, Batch, HandWired
from tests.train.test_recipes import changed

CHUNK = 5
SEQUENCES, TOKENS, WIDTH, VOCABULARY = 2, 9, 16, 31


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_chunks, "LEAST_LOGITS", 1)
    for module in (head_chunks, chunked_head):
        monkeypatch.setattr(module, "CHUNK_TOKENS", CHUNK)


@pytest.fixture
def head(spec: RunSpec) -> Head:
    torch.manual_seed(1)
    head = Head(spec.model)
    for values in head.parameters():
        torch.nn.init.normal_(values, 0.5, 0.5)
        values.grad = torch.zeros_like(values)
    return head


def gradients(head: Head, stream: Tensor, loss: Tensor) -> list[Tensor]:
    """All gradients after a backward that weighs the loss."""
    stream.grad = None
    for values in head.parameters():
        assert values.grad is not None
        values.grad.zero_()
    loss.backward(torch.tensor(0.25))
    assert stream.grad is not None
    return [stream.grad.clone(), *(v.grad.clone() for v in head.parameters() if v.grad is not None)]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_loss_and_gradients_are_the_plain_heads(head: Head, z_loss: float) -> None:
    stream = torch.randn(SEQUENCES, TOKENS, WIDTH, requires_grad=True)
    targets = torch.randint(VOCABULARY, (SEQUENCES, TOKENS))
    targets[0, 2:7] = -100  # targets that do not count
    plain = token_loss_sum(head(stream), targets, z_loss)
    wanted = gradients(head, stream, plain)
    loss = chunked_loss_sum(head, stream, targets, z_loss)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for found, due in zip(gradients(head, stream, loss), wanted, strict=True):
        assert torch.allclose(found, due, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert chunked_loss_sum(head, stream, targets, z_loss).item() == loss.item()


def test_the_matrix_gradient_can_wait_and_a_frozen_head_has_none(head: Head) -> None:
    stream = torch.randn(SEQUENCES, TOKENS, WIDTH, requires_grad=True)
    targets = torch.randint(VOCABULARY, (SEQUENCES, TOKENS))
    at_once = gradients(head, stream, chunked_loss_sum(head, stream, targets))
    owed = WeightGradients()
    leave_weight_gradients(head, owed)
    waiting = gradients(head, stream, chunked_loss_sum(head, stream, targets))
    assert not waiting[-1].any() and torch.equal(waiting[0], at_once[0])
    owed.settle()
    assert head.logits.weight.grad is not None
    assert torch.equal(head.logits.weight.grad, at_once[-1]), "the same to the last bit"
    leave_weight_gradients(head, None)
    head.logits.weight.requires_grad_(False)
    frozen = gradients(head, stream, chunked_loss_sum(head, stream, targets))
    assert torch.equal(frozen[0], at_once[0]) and not frozen[-1].any()


def test_what_is_computed_in_fewer_bits_is_summed_in_all(head: Head) -> None:
    stream = torch.randn(SEQUENCES, TOKENS, WIDTH, requires_grad=True)
    targets = torch.randint(VOCABULARY, (SEQUENCES, TOKENS))
    whole = gradients(head, stream, chunked_loss_sum(head, stream, targets))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_loss_sum(head, stream, targets)
    assert loss.dtype == torch.float32
    for found, due in zip(gradients(head, stream, loss), whole, strict=True):
        assert found.dtype == torch.float32
        assert 0.0 < (found - due).norm() < 0.05 * due.norm()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("plan", [ONE_PEER, TWO_BY_TWO], ids=["one peer", "two by two"])
def test_stages_with_it_learn_as_the_plain_loop(
    spec: RunSpec, toy_batch: Batch, recompute: bool, plan
) -> None:
    spec = changed(spec, optimizer={"z_loss": 0.01})
    assert head_in_chunks(spec), "the plain loop has the plain head all the same"
    expected = list(ReferenceRun(spec, toy_batch).losses(6))
    swarm = HandWired(spec, plan, toy_batch, recompute)
    assert [swarm.step(step) for step in range(6)] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.05


def test_where_it_pays_and_what_a_plan_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = {"layers": 2, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50257}
    large = run_spec(model=model, batch={"global_batch": 8, "microbatch": 1})
    logits = 1024 * 50257
    assert head_in_chunks(large)
    assert head_values(large) == 3 * logits // 4 + 768 * 50257, "half as much as before"
    boundary = 1024 * 768
    assert workload_of(large).head.saved_bytes == 4 * (2 * boundary + head_values(large))
    short = run_spec(model=model | {"context": 320}, batch={"global_batch": 8, "microbatch": 1})
    assert not head_in_chunks(short), "its matrix's gradient takes more than its logits"
    tiny = run_spec(model=model | {"vocabulary": 256}, batch={"global_batch": 8, "microbatch": 4})
    assert not head_in_chunks(tiny) and head_values(tiny) == 3 * 4 * 1024 * 256

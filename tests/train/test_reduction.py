"""Sums, shards and bytes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.gradient_parts import (
    flatten_gradients,
    shard_bounds,
    sum_parts,
    tensor_from_bytes,
    tensor_to_bytes,
    unflatten_gradients,
)


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_shards_cover_everything_evenly(length: int, holders: int) -> None:
    bounds = shard_bounds(length, holders)
    assert len(bounds) == holders and bounds[0][0] == 0 and bounds[-1][1] == length
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_sum_keeps_the_given_order() -> None:
    large, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert sum_parts([large, small, small]).item() == 2.0**24
    assert sum_parts([small, small, large]).item() == 2.0**24 + 2
    assert small.item() == 1.0 and large.item() == 2.0**24, "parts must stay as they were"


def test_flat_gradient_comes_apart_by_layer(spec: RunSpec) -> None:
    states = [LayerState.genesis(spec, layer) for layer in (1, 2)]
    for state in states:
        state.gradient_vector().fill_(float(state.layer))
    parts = unflatten_gradients(flatten_gradients(states), states)
    assert {layer: part.unique().item() for layer, part in parts.items()} == {1: 1.0, 2: 2.0}
    with pytest.raises(AssertionError):
        flatten_gradients(states[::-1])


def test_bytes_share_memory_where_they_can() -> None:
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    view = tensor_to_bytes(tensor)
    tensor[0, 0] = 9.0
    buffer = bytearray(view)
    shared = tensor_from_bytes(buffer, (2, 3))
    assert torch.equal(shared, tensor)
    buffer[:4] = b"\0\0\0\0"
    assert shared[0, 0] == 0
    copied = tensor_from_bytes(bytes(view), (2, 3))
    copied[0, 0] = 5.0
    assert torch.equal(tensor_from_bytes(b"", (0,)), torch.empty(0))


@pytest.mark.parametrize("length", [0, 23, 25, 28])
def test_wrong_length_is_the_senders_fault(length: int) -> None:
    with pytest.raises(PeerFault, match="24 are due"):
        tensor_from_bytes(bytes(length), (2, 3))

"""Tensors come back from their bytes as they were."""

import pytest
import torch

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.train.stage.tensor_bytes import tensor_from_bytes, tensor_to_bytes


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

"""Safetensors files of fp32 tensors, byte for byte the same wherever they are written.

The library orders metadata by chance and wants all tensors in memory at once. Here a file is its
header, which follows from names and shapes, and then the tensors one after another, so a model of
any size is written with one layer in memory.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

_LENGTH_BYTES = 8
STATE_PARTS = ("parameter", "first_moment", "second_moment")
STATE_HEADER_LIMIT_BYTES = 1 << 20
"""Of a layer's state: room for the names and shapes of some three thousand tensors."""
_METADATA_LIMIT_BYTES = 256

Entry = tuple[str, tuple[int, ...]]
"""Name and shape of a tensor."""


def entry_bytes(entry: Entry) -> int:
    """Size of one fp32 tensor."""
    return 4 * math.prod(entry[1])


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """The head of a file: its length, then JSON padded to a multiple of 8 bytes."""
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for entry in entries:
        name, shape = entry
        end = start + entry_bytes(entry)
        content[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def state_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Entries of a layer's state, whose parameters these are."""
    return [(f"{part}.{name}", shape) for part in STATE_PARTS for name, shape in entries]


def fits_in_state(entries: Sequence[Entry]) -> bool:
    """Whether a state's file can name so many tensors."""
    length = len(header(state_entries(entries), {})) + _METADATA_LIMIT_BYTES
    return length <= STATE_HEADER_LIMIT_BYTES


def file_bytes(entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
    """Size of the whole file."""
    return len(header(entries, metadata)) + sum(map(entry_bytes, entries))


def write_tensors(
    path: Path, entries: Sequence[Entry], metadata: Mapping[str, str], tensors: Iterable[Tensor]
) -> None:
    """Write `tensors`, in the order and with the shapes of `entries`. Raises OSError.

    The file is forced to the disk, and has its name only once it is whole.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("wb") as file:
            file.write(header(entries, metadata))
            for entry, tensor in zip(entries, tensors, strict=True):
                assert tuple(tensor.shape) == entry[1], (entry, tensor.shape)
                values = tensor.detach().float().cpu().contiguous().numpy()
                file.write(values.data.cast("B"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

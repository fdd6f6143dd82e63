"""The model: a GPT whose layers are units that peers hold, send and train on their own.

Layer 0 is the embedding, layers 1..B are the transformer blocks, layer B+1 is the final norm with
the linear head. Running them one after the other is the whole model: token numbers
[sequences, tokens] go in, logits [sequences, tokens, vocabulary] come out. The architecture is by
default GPT-2's (Radford et al. 2019): pre-norm blocks, learned positions, tanh-approximated GELU,
biases; `[model]` has other choices (`block`). The head has a matrix of its own, since the
embedding's may be held by another peer; a tied one is a copy that stays equal (`stage.tied_head`).
"""

import contextlib
import functools
import hashlib
import math

import numpy
import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.lora_spec import LoraSpec
from p2p_dtfm.train.model.block import Block
from p2p_dtfm.train.model.kinds.ends import Embedding, Head
from p2p_dtfm.train.model.kinds.ends import token_loss_sum as token_loss_sum  # of any GPT
from p2p_dtfm.train.model.kinds.kind import STANDARD_DEVIATION
from p2p_dtfm.train.model.kinds.registry import build_listed, deviation_in_listed
from p2p_dtfm.train.model.lora.adapted import adapt, allocate_trained, deviation_of_narrow
from p2p_dtfm.train.model.narrow.fixed_code import fixed_code

Entry = tuple[str, tuple[int, ...]]
"""Name and shape of a tensor."""
Told = dict[str, Tensor]
"""What blocks are told besides the stream, by the names of their arguments. It is the same for all
blocks; the head is told `code` as well."""
_NO_ADAPTERS = LoraSpec()
_WORDS_AT_ONCE = 1 << 20


def layer_count(spec: RunSpec) -> int:
    """Embedding, blocks and head together."""
    return spec.model.layer_count


def build_layer(spec: RunSpec, layer: int, device: torch.device | str = "cpu") -> nn.Module:
    """The module of a layer in fp32, its parameters *not yet initialised*. What is frozen, if
    anything is, is not there yet (`lora.adapted.set_base`)."""
    if spec.layers:
        return build_listed(spec, layer, device)
    if not spec.trains_adapters:
        return build_plain_layer(spec, layer, device)
    return allocate_trained(_build(spec.model, spec.lora, layer, "meta"), device)


def build_plain_layer(spec: RunSpec, layer: int, device: torch.device | str = "cpu") -> nn.Module:
    """A layer of the model itself, without adapters: as it is given to a run, and as it leaves
    it."""
    if spec.layers:
        return build_listed(spec, layer, device)
    return _build(spec.model, _NO_ADAPTERS, layer, device)


def build_timed_layer(spec: RunSpec, layer: int, device: torch.device | str = "cpu") -> nn.Module:
    """Like `build_layer`, with memory for what is frozen: for passes whose time counts."""
    if spec.layers:
        return build_listed(spec, layer, device)
    return _build(spec.model, spec.lora, layer, device)


def _build(model: ModelSpec, lora: LoraSpec, layer: int, device: torch.device | str) -> nn.Module:
    assert 0 <= layer < model.layer_count, layer
    kind = Embedding if layer == 0 else Block if layer <= model.layers else Head
    with _made_on(torch.device(device)):
        module = kind(model)
        if torch.get_default_dtype() != torch.float32:
            module = module.to(torch.float32)
        if lora.rank:
            adapt(module, model, lora, is_block=kind is Block)
    return module


def _made_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context that makes tensors on `device`. It is empty where they are made there anyway: else
    each function of torch asks in Python for the device, and a small layer takes twice as long."""
    return contextlib.nullcontext() if device == torch.get_default_device() else device


def layer_entries(spec: RunSpec, layer: int) -> list[Entry]:
    """Names and shapes of a layer's parameters that are trained, in canonical order."""
    if spec.layers:
        return list(_listed_entries(spec, layer))
    return list(_layer_entries(spec.model, spec.lora, layer))


def plain_entries(spec: RunSpec, layer: int) -> list[Entry]:
    """The same for a layer of the model itself: all of its parameters."""
    if spec.layers:
        return list(_listed_entries(spec, layer))
    return list(_layer_entries(spec.model, _NO_ADAPTERS, layer))


@functools.lru_cache(maxsize=1024)
def _layer_entries(model: ModelSpec, lora: LoraSpec, layer: int) -> tuple[Entry, ...]:
    return _entries_of(_build(model, lora, layer, "meta"))


@functools.lru_cache(maxsize=1024)
def _listed_entries(spec: RunSpec, layer: int) -> tuple[Entry, ...]:
    return _entries_of(build_listed(spec, layer, "meta"))


def _entries_of(module: nn.Module) -> tuple[Entry, ...]:
    named = module.named_parameters()
    return tuple((name, tuple(parameter.shape)) for name, parameter in named)


def document_numbers(tokens: Tensor, end_of_document: int) -> Tensor:
    """The number of the document that each token belongs to, within its sequence: int64 [sequences,
    tokens]. The token that ends a document is its last."""
    ends = (tokens == end_of_document).long()
    return ends.cumsum(dim=1) - ends


def told_beside(spec: RunSpec, tokens: Tensor | None) -> Told:
    """What blocks are told of a microbatch's tokens; nothing if `tokens` is None."""
    told: Told = {}
    if tokens is not None and spec.model.written_width:
        told["code"] = fixed_code(spec.model, tokens)
    if tokens is not None and spec.data.masks_documents:
        told["documents"] = document_numbers(tokens, spec.data.end_of_document)
    return told


@torch.no_grad()
def initialise_layer(module: nn.Module, spec: RunSpec, layer: int) -> None:
    """Genesis parameters, bit-equal on any machine: norms 1, biases 0, matrices random. A single
    number, which a listed layer may have, begins as a bias does.

    Matrices are uniform with GPT-2's standard deviation of 0.02. Those that write into the residual
    stream are scaled by 1/sqrt(2 * blocks), as there are 2 * blocks writers (Radford et al. 2019,
    section 2.3). Where a run lists its layers, their kinds choose the deviation.
    """
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif parameter.dim() <= 1 or (spec.trains_adapters and name.endswith(".wide")):
            parameter.zero_()
        else:
            deviation = _deviation(spec, layer, name, tuple(parameter.shape))
            place = (layer, name)
            if spec.model.tied_head and name == "logits.weight":
                place = (0, "token.weight")
            values = _uniform_values(spec.seed, *place, parameter.numel(), deviation)
            parameter.copy_(torch.from_numpy(values).view_as(parameter))


def _deviation(spec: RunSpec, layer: int, name: str, shape: tuple[int, ...]) -> float:
    """The deviation of a random matrix. Matrices in other people's kinds may have the names of
    ours, so their kind is asked."""
    if spec.trains_adapters and name.endswith(".narrow"):
        return deviation_of_narrow(shape[1])
    deviation, is_ours = STANDARD_DEVIATION, True
    if spec.layers:
        deviation = deviation_in_listed(spec, layer, name, shape)
        is_ours = spec.layers[layer].kind == "block"
    if is_ours and name in ("attention_output.weight", "feed_forward_output.weight"):
        deviation /= math.sqrt(2 * spec.model.layers)
    return deviation


def _uniform_values(
    seed: int, layer: int, name: str, count: int, deviation: float
) -> "numpy.typing.NDArray[numpy.float32]":
    """`count` uniform values with the given standard deviation, from integers alone.

    Each 24 random bits k become the odd integer 2k + 1 - 2^24, which fp32 holds exactly; the
    multiplication by the step is the only rounding, and IEEE 754 defines it to the last bit.
    """
    material = f"genesis\0{seed}\0{layer}\0{name}".encode()
    key = int.from_bytes(hashlib.blake2b(material, digest_size=16).digest(), "little")
    generator = numpy.random.Philox(key=key)
    step = numpy.float32(deviation * math.sqrt(3.0) / (1 << 24))
    values = numpy.empty(count, dtype=numpy.float32)
    for start in range(0, count, 2 * _WORDS_AT_ONCE):
        end = min(count, start + 2 * _WORDS_AT_ONCE)
        words = generator.random_raw((end - start + 1) // 2)
        bits = numpy.stack([(words & 0xFFFFFFFF) >> 8, words >> 40], axis=1).reshape(-1)
        odd = 2 * bits[: end - start].astype(numpy.int64) + 1 - (1 << 24)
        values[start:end] = odd.astype(numpy.float32) * step
    return values

"""Finding a kind by its name: those that come along, and those that other packages register.

Of other packages, only one whose entry point bears just that name is loaded. It is installed
because this machine's owner wanted it: a run from the network can name kinds, not bring them.
"""

import functools
from importlib.metadata import entry_points

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.layers.head_chunks import head_in_chunks
from p2p_dtfm.core.protocol.layers.listed import LayerSizes, ListedLayer
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.kinds.chunked_head import chunked_loss_sum
from p2p_dtfm.train.model.kinds.ends import Head, token_loss_sum
from p2p_dtfm.train.model.kinds.gpt_kinds import BlockKind, EmbeddingKind, HeadKind, ProjectionKind
from p2p_dtfm.train.model.kinds.image_kinds import ClassifierKind, ConvolutionKind, ImageKind
from p2p_dtfm.train.model.kinds.kind import LayerKind, Place, Shape
from p2p_dtfm.train.model.narrow.fixed_code import with_code
from p2p_dtfm.train.model.tensor_file import fits_in_state

GROUP = "p2p_dtfm.layers"
"""The group of entry points, each of which is an instance of `LayerKind`."""
_SHOWN_CHARACTERS = 200
SHIPPED: dict[str, LayerKind] = {
    "embedding": EmbeddingKind(),
    "block": BlockKind(),
    "projection": ProjectionKind(),
    "head": HeadKind(),
    "image": ImageKind(),
    "convolution": ConvolutionKind(),
    "classifier": ClassifierKind(),
}


@functools.lru_cache(maxsize=256)
def kind_named(name: str) -> LayerKind:
    """The kind of that name. Raises `UserError` if no such kind is installed."""
    if name in SHIPPED:
        return SHIPPED[name]
    found = [point for point in entry_points(group=GROUP) if point.name == name]
    if not found:
        others = {point.name for point in entry_points(group=GROUP)}
        raise UserError(
            f"a layer of kind {name!r}, and no such kind is installed here",
            (
                "install the package that registers it, on every machine that takes part",
                f"known here: {', '.join(sorted({*SHIPPED, *others}))}",
            ),
        )
    if len(found) > 1:
        raise UserError(
            f"two packages register layers of kind {name!r}",
            f"remove one of {', '.join(sorted(str(point.value) for point in found))}",
        )
    try:
        kind = found[0].load()
    except Exception as error:  # whatever another package raises
        raise UserError(
            f"the package that registers layers of kind {name!r} cannot be loaded: "
            f"{found[0].value} raises {_in_words(error)}",
            "install another version of that package, or tell who wrote it",
        ) from error
    if not isinstance(kind, LayerKind):
        raise UserError(
            f"{found[0].value}, registered as a kind of layer, is no instance of LayerKind",
            "see docs/layers.md, or remove that package",
        )
    return kind


def with_sizes(spec: RunSpec) -> RunSpec:
    """The run with the sizes of the layers that it lists, as the kinds installed here say them. A
    run that lists no layers is returned as it is.

    Raises `UserError` for a kind that is not here, a layer that cannot stand where it does, or
    sizes that the kind does not come to. Nothing is allocated.
    """
    if not spec.layers:
        return spec
    entry: Shape = (spec.model.context,)
    layers = []
    for number, layer in enumerate(spec.layers):
        sizes = _sizes(spec, number, layer, entry)
        if layer.sizes not in (None, sizes):
            raise UserError(
                f"layer {number} of the run {spec.name} is said to come to {layer.sizes}, and its "
                f"kind {layer.kind!r} here comes to {sizes}",
                "install the same version of that kind on every machine, or leave the sizes out",
            )
        layers.append(layer.model_copy(update={"sizes": sizes}))
        entry = sizes.boundary
    return spec.model_copy(update={"layers": tuple(layers)})


def _sizes(spec: RunSpec, number: int, layer: ListedLayer, entry: Shape) -> LayerSizes:
    kind = kind_named(layer.kind)
    place = Place(spec.model, layer.options, entry, number == 0)
    try:
        unknown = sorted(layer.options.keys() - kind.options)
        if unknown:
            known = ", ".join(sorted(kind.options)) or "none"
            raise ValueError(f"has no option {unknown[0]!r} (known: {known})")
        boundary, costs = kind.boundary(place), kind.costs(place)
        with torch.device("meta"):
            module = kind.build(place)
        if any(True for _ in module.buffers()):
            raise ValueError("has buffers, which nobody would send along with its parameters")
        entries = [(name, tuple(values.shape)) for name, values in module.named_parameters()]
        if not fits_in_state(entries):
            raise ValueError(f"has {len(entries)} tensors, more than a state's file can name")
        return LayerSizes(
            boundary=boundary,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            saved_values=costs.saved_values,
            forward_flops=costs.forward_flops,
        )
    except ValidationError as error:
        raise _cannot(number, layer, "it is too large, or has no parameters") from error
    except (ValueError, OverflowError, RuntimeError) as error:  # for sizes that torch cannot hold
        raise _cannot(number, layer, str(error)[:_SHOWN_CHARACTERS]) from error
    except UserError:
        raise
    except Exception as error:
        if layer.kind in SHIPPED:
            raise
        why = f"{type(kind).__module__}.{type(kind).__name__} raises {_in_words(error)}"
        raise _cannot(number, layer, why) from error


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:_SHOWN_CHARACTERS]}"


def _cannot(number: int, layer: ListedLayer, why: str) -> UserError:
    return UserError(
        f"layer {number} of [[layers]], of kind {layer.kind!r}: {why}",
        f"change the {number + 1}. table of [[layers]]; docs/layers.md says what each kind reads",
    )


def build_listed(spec: RunSpec, layer: int, device: torch.device | str) -> nn.Module:
    """The module of a listed layer in fp32, its parameters not yet initialised."""
    entry = (spec.model.context,) if layer == 0 else spec.boundary_shape(layer)[1:]
    place = Place(spec.model, spec.layers[layer].options, entry, layer == 0)
    with torch.device(device):
        return kind_named(spec.layers[layer].kind).build(place).to(torch.float32)


def require_stated_shape(spec: RunSpec, layer: int, answer: Tensor) -> None:
    """Require that a listed layer, other than the last, has passed on what its kind says. The next
    stage would take the sender of anything else for a liar. Raises `UserError`."""
    stated = spec.boundary_shape(layer + 1)[1:]
    if tuple(answer.shape[1:]) != stated:
        kind, found = spec.layers[layer].kind, list(answer.shape[1:])
        raise UserError(
            f"layer {layer} of the run {spec.name}: its kind {kind!r} gives on {found} for each "
            f"sequence, and says {list(stated)}",
            "tell who wrote that kind, or install another version of it on every machine",
        )


def deviation_in_listed(spec: RunSpec, layer: int, name: str, shape: Shape) -> float:
    """The deviation of a matrix of this layer before the first step."""
    return kind_named(spec.layers[layer].kind).deviation(name, shape)


def loss_sum(spec: RunSpec, answer: Tensor, targets: Tensor) -> Tensor:
    """The loss of the last layer's answer to a microbatch, summed over all its tokens."""
    z_loss = spec.optimizer.z_loss
    if spec.layers:
        return kind_named(spec.layers[-1].kind).loss_sum(answer, targets, z_loss)
    return token_loss_sum(answer, targets, z_loss)


def loss_sum_of_last(
    spec: RunSpec,
    module: nn.Module,
    entry: Tensor,
    targets: Tensor,
    code: Tensor | None = None,
) -> Tensor:
    """The last layer and the loss. With a large vocabulary the logits are never all in memory at
    once. `code`: the channels that no block writes, where there are any."""
    entry = with_code(entry, code)
    if head_in_chunks(spec):
        assert isinstance(module, Head)
        return chunked_loss_sum(module, entry, targets, spec.optimizer.z_loss)
    return loss_sum(spec, module(entry).float(), targets)


def require_gpt(spec: RunSpec, what: str) -> None:
    """Raises `UserError` for a run that lists its layers: it cannot have `what`."""
    if spec.layers:
        raise UserError(
            f"{what} knows GPTs whose blocks are alike, and the run {spec.name} lists layers of "
            "its own",
            "read its layers with safetensors: each is a file of a checkpoint (docs/layers.md)",
        )

"""Small pictures as sequences of grey values, and a convolutional network that reads them.

image        token numbers, row by row, to [channels, height, width]
convolution  to `channels`, every `stride`-th place; added to what it reads where that fits
classifier   a logit for each of `classes`; the target of a sequence's last token is the answer
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2p_dtfm.train.model.deferred_gradients import Linear
from p2p_dtfm.train.model.kinds.kind import Costs, LayerKind, Place, Shape, require_answers

_KERNEL = 3
_GELU_VALUES = 4
"""What autograd keeps for each value of an output: of input, norm, products and non-linearity."""


class ImageKind(LayerKind):
    options = frozenset({"height", "width", "channels", "white"})

    def boundary(self, place: Place) -> Shape:
        height, width = self._size(place)
        return place.number("channels", 16, most=1 << 12), height, width

    def build(self, place: Place) -> nn.Module:
        channels, height, width = self.boundary(place)
        return Image(height, width, channels, place.number("white", 255))

    def costs(self, place: Place) -> Costs:
        channels, height, width = self.boundary(place)
        values = channels * height * width
        return Costs(height * width + 2 * values, 2 * _KERNEL * _KERNEL * values)

    def _size(self, place: Place) -> tuple[int, int]:
        if not place.is_first:
            raise ValueError("reads token numbers, so it comes first")
        height, width = place.number("height", 0, most=1 << 12), place.number("width", 0)
        if height * width != place.model.context:
            raise ValueError(
                f"height times width ({height * width}) must be model.context "
                f"({place.model.context}): a token for each place"
            )
        return height, width


class ConvolutionKind(LayerKind):
    options = frozenset({"channels", "stride"})

    def boundary(self, place: Place) -> Shape:
        entry, height, width = _picture(place)
        stride = place.number("stride", 1, most=8)
        channels = place.number("channels", entry, most=1 << 12)
        return channels, -(-height // stride), -(-width // stride)

    def build(self, place: Place) -> nn.Module:
        channels, _, _ = self.boundary(place)
        return Convolution(place.entry[0], channels, place.number("stride", 1, most=8))

    def costs(self, place: Place) -> Costs:
        entry, height, width = _picture(place)
        channels, rows, columns = self.boundary(place)
        values = channels * rows * columns
        saved = _GELU_VALUES * values + 2 * entry * height * width
        return Costs(saved, 2 * _KERNEL * _KERNEL * entry * values)


class ClassifierKind(LayerKind):
    options = frozenset({"classes"})

    def boundary(self, place: Place) -> Shape:
        _picture(place)
        return (place.number("classes", 10, least=2, most=place.model.vocabulary),)

    def build(self, place: Place) -> nn.Module:
        channels, height, width = place.entry
        return Classifier(channels, height * width, self.boundary(place)[0])

    def costs(self, place: Place) -> Costs:
        channels, height, width = _picture(place)
        values, (classes,) = channels * height * width, self.boundary(place)
        return Costs(3 * values + 3 * classes, 2 * values * classes)

    def loss_sum(self, answer: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        """The loss, counted once for each token of a sequence: so the mean over tokens is the mean
        over pictures."""
        tokens, classes = targets.shape[1], targets[:, -1]
        require_answers(classes, answer.shape[-1])
        loss = functional.cross_entropy(answer, classes, reduction="sum")
        if z_loss:
            squares = z_loss * torch.logsumexp(answer, dim=1).square().sum()
            loss = loss + (squares - squares.detach())
        return tokens * loss


class Image(nn.Module):
    def __init__(self, height: int, width: int, channels: int, white: int) -> None:
        super().__init__()
        self.height, self.width, self.white = height, width, white
        self.filter = _filter(1, channels, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """[sequences, places], 0 to `white`, to [sequences, channels, height, width]."""
        grey = tokens.float() / self.white
        result: Tensor = self.filter(grey.view(-1, 1, self.height, self.width))
        return result


class Convolution(nn.Module):
    def __init__(self, entry: int, channels: int, stride: int) -> None:
        super().__init__()
        self.norm = _norm(entry)
        self.filter = _filter(entry, channels, stride)
        self.is_added = entry == channels and stride == 1

    def forward(self, picture: Tensor) -> Tensor:
        """[sequences, entry, height, width] to [sequences, channels, rows, columns]."""
        change: Tensor = self.filter(functional.gelu(self.norm(picture)))
        return picture + change if self.is_added else change


class Classifier(nn.Module):
    def __init__(self, channels: int, places: int, classes: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.logits = Linear(channels * places, classes, bias=True)

    def forward(self, picture: Tensor) -> Tensor:
        """[sequences, channels, height, width] to logits [sequences, classes]."""
        result: Tensor = self.logits(functional.gelu(self.norm(picture)).flatten(1))
        return result


class _Filter(nn.Conv2d):
    def reset_parameters(self) -> None:
        """Draws nothing, as it would be overwritten: genesis follows."""


def _filter(entry: int, channels: int, stride: int) -> nn.Conv2d:
    return _Filter(entry, channels, _KERNEL, stride=stride, padding=_KERNEL // 2)


def _norm(channels: int) -> nn.GroupNorm:
    """Over all values of a picture, so that other pictures of the microbatch do not matter."""
    return nn.GroupNorm(1, channels)


def _picture(place: Place) -> tuple[int, int, int]:
    """(channels, height, width) of the layer's input. Raises ValueError."""
    if place.is_first:
        raise ValueError('reads no token numbers: begin with kind = "image"')
    channels, height, width = place.require_entry("channels", "height", "width")
    return channels, height, width

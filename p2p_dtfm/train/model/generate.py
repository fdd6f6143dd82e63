"""Text from a checkpoint, token by token."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy
import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.block import PastTokens
from p2p_dtfm.train.model.checkpoint import list_checkpoints, read_manifest
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.kinds.registry import require_gpt
from p2p_dtfm.train.model.lora.frozen_base import computing_layer
from p2p_dtfm.train.model.narrow.whole_layers import made_whole

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_NO_CHARACTER = 4 * _REPLACEMENT
"""The beginning of a character has at most three bytes. So these are bytes that stay no text."""
_NARROW = 512
"""For widths up to this one a second thread gains nothing, token by token."""


Loaded = tuple[RunSpec, list[nn.Module]]
"""A model in memory: its run spec and its layers."""


class GenerationTokenizer(Protocol):
    """What generation needs of a tokenizer."""

    vocabulary: int
    end_of_document: int
    """The token after each document, and so before the next one."""
    start_of_document: int | None
    """The token before each document, if there is one."""

    def encode(self, text: str) -> Iterable[int]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...

    def decode_on(self, tokens: Iterable[int]) -> str:
        """The text of tokens that stand in the middle of a text."""
        ...


def generate(
    checkpoint: Path,
    tokenizer: GenerationTokenizer,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """The text that follows `prompt`; see `stream`."""
    return "".join(stream(checkpoint, tokenizer, prompt, tokens, temperature, seed))


def stream(
    checkpoint: Path,
    tokenizer: GenerationTokenizer,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> Iterator[str]:
    """Yield text as it is drawn, `tokens` tokens in all.

    `checkpoint` is the directory of one step, or of several: then the newest with all layers is
    taken. Temperature 0 always takes the most probable token. Equal arguments give equal text.
    Raises `UserError`.
    """
    if temperature < 0:
        raise UserError(f"temperature {temperature} is negative", "give 0 or more, 0.8 say")
    if tokens < 0:
        raise UserError(f"{counted(tokens, 'token')} cannot be generated", "give 0 or more")
    loaded = load_model(checkpoint)
    return stream_until(None, loaded, tokenizer, prompt, tokens, temperature, seed)


def stream_until(
    end: int | None,
    loaded: Loaded,
    tokenizer: GenerationTokenizer,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[str]:
    """The same with a model that is in memory: at most `tokens` tokens, and none after `end`."""
    spec, layers = loaded
    model = _Continuation(layers, spec.model.context, _ends_attention(spec))
    drawn = _draw(model, tokenizer, prompt, tokens, temperature, seed)
    until_end = itertools.takewhile(lambda token: token != end, drawn)
    return _whole_characters(tokenizer, until_end, goes_on=bool(prompt))


def spare_processors(spec: RunSpec) -> None:
    """For a process that only writes text. The threads of a narrow model wait for one another at
    each product, spinning. Beside a daemon that trains, two threads are several times slower than
    one."""
    if spec.model.width <= _NARROW:
        torch.set_num_threads(1)


def written_by(
    loaded: tuple[RunSpec, Sequence[nn.Module]],
    tokenizer: GenerationTokenizer,
    prompt: str,
    tokens: int,
) -> Iterator[str]:
    """The text after `prompt` by a model that is in memory, piece by piece; the same each time."""
    spec, layers = loaded
    model = _Continuation(layers, spec.model.context, _ends_attention(spec))
    drawn = _draw(model, tokenizer, prompt, tokens, temperature=0.8, seed=0)
    return _whole_characters(tokenizer, drawn, goes_on=bool(prompt))


def whole_checkpoint(checkpoint: Path) -> Path:
    """The directory of one step: as given, or the newest in it with all layers. UserError."""
    if (checkpoint / "manifest.json").exists():
        return checkpoint
    for found in list_checkpoints(checkpoint):
        if len(found.layers) == layer_count(found.manifest.spec()):
            return found.directory
    raise UserError(
        f"no checkpoint with all layers in {checkpoint}",
        (
            "give the directory of a run's checkpoints",
            "fetch the layers that this peer did not hold",
        ),
    )


class _Continuation:
    """The model, with what it remembers of the tokens so far."""

    def __init__(
        self, layers: Sequence[nn.Module], context: int, ends_attention: int | None = None
    ) -> None:
        """`ends_attention`: the token behind which attention does not reach back, if any."""
        self.context = context
        self._ends_attention = ends_attention
        self._embedding, *self._blocks, self._head = layers
        self._past: list[PastTokens] = []
        self._begin = 0
        """The place in the window of the first token that is remembered."""

    @torch.no_grad()
    def logits(self, written: list[int]) -> Tensor:
        """The logits of the token after `written`, [vocabulary]. `written` is longer than at the
        last call.

        Only what is new is computed, until the context is full. From then on all positions change
        with every token, and all is computed anew.
        """
        window = written[-self.context :]
        begin = self._document_begin(window)
        if not self._past or len(written) > self.context or begin != self._begin:
            self._past = [PastTokens() for _ in self._blocks]
            self._begin = begin
        first = begin + self._past[0].count
        stream = torch.tensor([window[first:]], dtype=torch.int64)
        stream = self._embedding(stream, first)
        for block, past in zip(self._blocks, self._past, strict=True):
            stream = block(stream, past)
        found: Tensor = self._head(stream[:, -1:])[0, 0]
        return found

    def _document_begin(self, window: list[int]) -> int:
        """The place of the first token that the last one may look at. The token that ends a
        document is its last. Positions go on, as in training."""
        for place in range(len(window) - 1, 0, -1):
            if window[place - 1] == self._ends_attention:
                return place
        return 0


def _ends_attention(spec: RunSpec) -> int | None:
    """The token that ends documents, in a run whose attention stays within them."""
    return spec.data.end_of_document if spec.data.masks_documents else None


def load_model(checkpoint: Path) -> Loaded:
    """The model in a directory as `stream` takes it. Raises `UserError`."""
    directory = whole_checkpoint(checkpoint)
    spec = read_manifest(directory).spec()
    require_gpt(spec, "generate")
    layers = (computing_layer(directory, layer) for layer in range(layer_count(spec)))
    return spec, [made_whole(spec, number, layer) for number, layer in enumerate(layers)]


def _draw(
    model: _Continuation,
    tokenizer: GenerationTokenizer,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[int]:
    generator = numpy.random.Generator(numpy.random.Philox(key=seed))
    start = tokenizer.start_of_document
    begun = [] if start is None else [start]
    written = [*begun, *map(int, tokenizer.encode(prompt))] or [tokenizer.end_of_document]
    for _ in range(tokens):
        logits = model.logits(written)[: tokenizer.vocabulary]
        token = _choose(logits, temperature, float(generator.random()))
        written = [*written[-model.context :], token]
        yield token


def _choose(logits: Tensor, temperature: float, chance: float) -> int:
    """The token at `chance` (0..1) of the cumulative distribution of softmax(logits / T)."""
    if temperature == 0:
        return int(logits.argmax())
    weights = torch.softmax(logits.double() / temperature, dim=0).cumsum(dim=0)
    place = int(torch.searchsorted(weights, chance * weights[-1].item(), right=True))
    return min(place, len(weights) - 1)


def _whole_characters(
    tokenizer: GenerationTokenizer, drawn: Iterable[int], goes_on: bool
) -> Iterator[str]:
    """Decode tokens as they come, but hold back those that end within a character. In scripts of
    wide characters many in a row may do so, each with the end of one and the beginning of the next.
    `goes_on`: whether text stands before the first token."""
    pending: list[int] = []
    decode = tokenizer.decode_on if goes_on else tokenizer.decode
    for token in drawn:
        pending.append(token)
        text = decode(pending)
        if not text.endswith(_REPLACEMENT) or text.endswith(_NO_CHARACTER):
            yield text
            pending, decode = [], tokenizer.decode_on
    if pending:
        yield decode(pending)

"""A transformer block with the choices of `[model]`: GPT-2's, Llama's and Qwen3's are among them.

    stream [sequences, tokens, width]
      + attention(norm(stream))      heads of queries, groups of which share keys and values
      + feed_forward(norm(stream))   GELU (two matrices) or SwiGLU (three)

A block that writes to few channels of the stream takes and gives these alone (`fixed_code`).

Matrices that read the same input are one matrix here, their rows one after another: queries, keys
and values in `attention_input`; gate and value of SwiGLU in `feed_forward_input`.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2p_dtfm.core.protocol.model_spec import ModelSpec, RopeSpec
from p2p_dtfm.train.model.deferred_gradients import Linear
from p2p_dtfm.train.model.narrow.fixed_code import with_code

_TABLES = 8
"""Tables of angles that are kept, each for a rope, a head's width, a count of tokens and a
device."""


class PastTokens:
    """Keys and values of the tokens that a block has seen, for generating one after another.

    Both are [sequences, groups, tokens, channels of a head].
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def count(self) -> int:
        return 0 if self._keys is None else self._keys.shape[2]

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, with these behind the earlier ones."""
        if self._keys is not None and self._values is not None:
            keys = torch.cat((self._keys, keys), dim=2)
            values = torch.cat((self._values, values), dim=2)
        self._keys, self._values = keys, values
        return keys, values


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each added to the stream it reads."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model
        width, hidden = model.width, model.hidden_width
        queries, keys = model.query_width, model.key_width
        self.attention_norm = norm_over(model, width)
        self.attention_input = Linear(width, queries + 2 * keys, bias=model.attention_bias)
        if model.query_key_norm:
            self.query_norm = norm_over(model, model.each_head)
            self.key_norm = norm_over(model, model.each_head)
        self.attention_output = Linear(queries, model.boundary_width, bias=model.attention_bias)
        self.feed_forward_norm = norm_over(model, width)
        inputs = 1 if model.feed_forward == "gelu" else 2
        self.feed_forward_input = Linear(width, inputs * hidden, bias=model.feed_forward_bias)
        self.feed_forward_output = Linear(
            hidden, model.boundary_width, bias=model.feed_forward_bias
        )

    def forward(
        self,
        stream: Tensor,
        past: PastTokens | None = None,
        documents: Tensor | None = None,
        code: Tensor | None = None,
    ) -> Tensor:
        """[sequences, tokens, boundary width] to the same. With a `past` that is not empty, tokens
        is 1.

        `documents`: which document each token belongs to, int64 [sequences, tokens]; attention does
        not cross from one document to another. `code`: the channels that no block writes, if any.
        """
        assert (code is None) == (not self.model.written_width), "the code fills the stream"
        whole = with_code(stream, code)
        stream = stream + self._attend(self.attention_norm(whole), past, documents)
        whole = with_code(stream, code)
        hidden = self._hidden(self.feed_forward_input(self.feed_forward_norm(whole)))
        result: Tensor = stream + self.feed_forward_output(hidden)
        return result

    def _hidden(self, entry: Tensor) -> Tensor:
        """[sequences, tokens, hidden width]: the input of `feed_forward_output`."""
        if self.model.feed_forward == "gelu":
            return functional.gelu(entry, approximate="tanh")
        gate, value = entry.chunk(2, dim=2)
        return functional.silu(gate) * value

    def _attend(self, normed: Tensor, past: PastTokens | None, documents: Tensor | None) -> Tensor:
        """[sequences, tokens, width] to what attention adds to the stream."""
        model = self.model
        parts = self.attention_input(normed).split(
            [model.query_width, model.key_width, model.key_width], dim=2
        )
        # each [sequences, heads or groups of them, tokens, channels of a head]
        query, key, value = (
            part.view(*normed.shape[:2], -1, model.each_head).transpose(1, 2) for part in parts
        )
        if model.query_key_norm:
            query, key = self.query_norm(query.float()), self.key_norm(key.float())
        before = 0 if past is None else past.count
        if model.position == "rope":
            query, key = turned(model, query, before), turned(model, key, before)
        query, key = query.to(value.dtype), key.to(value.dtype)  # fewer bits under autocast
        if past is not None:
            key, value = past.extended(key, value)
        assert before == 0 or normed.shape[1] == 1, "tokens after others come one by one"
        mask = None if documents is None else _within_documents(documents)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=before == 0 and mask is None,
            enable_gqa=model.key_width < model.query_width,
        )
        together = mixed.transpose(1, 2).reshape(*normed.shape[:2], model.query_width)
        result: Tensor = self.attention_output(together)
        return result


def _within_documents(documents: Tensor) -> Tensor:
    """Which tokens each token may look at, bool [sequences, 1, tokens, tokens]: those of its
    document up to itself."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


def norm_over(model: ModelSpec, width: int) -> nn.Module:
    """The model's norm over the last dimension, which has `width` channels."""
    if model.norm == "layer":
        return _LayerNorm(width, eps=model.norm_epsilon)
    return _RMSNorm(width, eps=model.norm_epsilon)


class _LayerNorm(nn.LayerNorm):
    def reset_parameters(self) -> None:
        """As in `Linear`: nothing is drawn only to be overwritten."""


class _RMSNorm(nn.RMSNorm):
    def reset_parameters(self) -> None:
        """As in `Linear`."""


def turned(model: ModelSpec, heads: Tensor, first: int = 0) -> Tensor:
    """Queries or keys [sequences, heads, tokens, channels], each turned by its token's position.

    Channel n and channel n + channels / 2 are a pair, as in checkpoints of `transformers`. The
    first token has position `first`.
    """
    tokens = heads.shape[2]
    room = max(model.context, first + tokens)
    cosines, sines = _angles(model.rope, model.each_head, room, str(heads.device))
    cosines, sines = cosines[first : first + tokens], sines[first : first + tokens]
    left, right = heads.chunk(2, dim=3)
    return torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=3)


@lru_cache(maxsize=_TABLES)
def _angles(rope: RopeSpec, channels: int, tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 [tokens, channels / 2] each, scaled as the rope says."""
    with torch.inference_mode(False), torch.no_grad():
        positions = torch.arange(tokens, dtype=torch.float32)
        angles = torch.outer(positions, frequencies(rope, channels))
        scale = attention_factor(rope)
        return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def frequencies(rope: RopeSpec, channels: int) -> Tensor:
    """Radians for each token, fp32 [channels / 2], from the fastest to the slowest pair.

    In the order of operations of `transformers`: one bit more or less is multiplied by the
    position, which is 1e-4 of a turn after a few thousand tokens.
    """
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    powers = rope.theta**exponents
    plain = 1.0 / powers
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        return _by_wavelength(rope, plain)
    if rope.scaling == "yarn":
        kept = 1.0 - _ramp(rope, channels)
        return 1.0 / (rope.factor * powers) * (1.0 - kept) + plain * kept
    return plain  # dynamic scaling begins beyond the positions that the model is made for


def attention_factor(rope: RopeSpec) -> float:
    """The factor by which queries and keys grow (yarn)."""
    if rope.scaling != "yarn":
        return 1.0
    return rope.attention_factor or 0.1 * math.log(rope.factor) + 1.0


def _by_wavelength(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Waves that turn often within the original positions stay, those that hardly turn become
    `factor` times longer, and those between are mixed."""
    lengths = 2.0 * math.pi / plain
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = (rope.original_positions / lengths - low) / (high - low)
    mixed = (1.0 - kept) * plain / rope.factor + kept * plain
    mixed = torch.where(lengths > rope.original_positions / low, plain / rope.factor, mixed)
    return torch.where(lengths < rope.original_positions / high, plain, mixed)


def _ramp(rope: RopeSpec, channels: int) -> Tensor:
    """How much of each frequency is divided by `factor`: 0 for fast pairs, 1 for slow ones."""

    def pair_that_turns(rotations: float) -> float:
        """The pair that turns so often within the original positions."""
        per_turn = rope.original_positions / (rotations * 2.0 * math.pi)
        return channels * math.log(per_turn) / (2.0 * math.log(rope.theta))

    first, last = pair_that_turns(rope.fast_rotations), pair_that_turns(rope.slow_rotations)
    if rope.whole_rotations:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    if first == last:
        last += 0.001  # avoids a division by zero: the ramp becomes a step
    pairs = torch.arange(channels // 2, dtype=torch.float32)
    return ((pairs - first) / (last - first)).clamp(0.0, 1.0)

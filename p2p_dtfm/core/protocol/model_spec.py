"""What model a run trains: its sizes, and the choices by which one GPT differs from another.

Every choice defaults to GPT-2's. Default choices are not written into a run's bytes, so that a run
keeps its name when this program learns another choice. `preset` in a run spec fills in the choices
of a family; what is stated beside it takes precedence.
"""

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

Norm = Literal["layer", "rms"]
Position = Literal["learned", "rope"]
FeedForward = Literal["gelu", "swiglu"]
Scaling = Literal["none", "linear", "dynamic", "llama3", "yarn"]
CODE_CHANNELS_PER_BIT = 2
"""Least channels of the fixed code for each bit of a token's number. Rows of so many random signs
are all unlike, but for about one pair. With half as many, a fifth of the tokens would share a row.
"""


def true_is_no_number(table: type[BaseModel], said: Any) -> Any:
    """Refuses true and false where a number is due: Python takes them for 1 and 0. Returns what was
    said; raises `ValueError`."""
    for name, value in said.items() if isinstance(said, Mapping) else ():
        known = table.model_fields.get(name)
        if known is None or not takes_numbers(known.annotation):
            continue
        if isinstance(value, bool):
            raise ValueError(f"{name} is {str(value).lower()}, and must be a number")
        if isinstance(value, list | tuple) and any(isinstance(it, bool) for it in value):
            raise ValueError(f"{name} has true or false where a number is due")
    return said


def takes_numbers(kind: Any) -> bool:
    """Whether a field of this type may be a number, and neither true nor false: also one of a few
    numbers, a number or a word, or numbers in a list."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(type(it) is int for it in parts)
    if origin in (Annotated, Union, UnionType, tuple):
        return bool not in parts and any(map(takes_numbers, parts))
    return kind in (int, float)


STEPS_LIMIT = 1 << 40
"""No run has more steps. Vast numbers would have no canonical bytes, and so no digest."""


class Section(BaseModel):
    """A table of a run spec."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, said: Any) -> Any:
        return true_is_no_number(cls, said)


class RopeSpec(Section):
    """Rotary positions (Su et al. 2021), and how a checkpoint stretches them to longer texts.

    `linear` divides all frequencies by `factor`. `dynamic` changes nothing up to `positions`, and
    no sequence here is longer. `llama3` divides the low frequencies. `yarn` (Peng et al. 2023)
    divides the low ones too, reached from the high ones by a ramp, and scales attention.
    """

    theta: float = Field(default=10000.0, gt=1, le=1e12, description="the longest wave / (2 pi)")
    scaling: Scaling = "none"
    factor: float = Field(default=1.0, ge=1, le=1e6)
    positions: int = Field(
        default=0, ge=0, le=1 << 30, description="tokens that the model is made for; 0: context"
    )
    original_positions: int = Field(
        default=0, ge=0, le=1 << 30, description="llama3, yarn: before it was stretched"
    )
    low_frequency_factor: float = Field(default=1.0, gt=0, le=1e6, description="llama3")
    high_frequency_factor: float = Field(default=4.0, gt=0, le=1e6, description="llama3")
    fast_rotations: float = Field(default=32.0, gt=0, le=1e6, description="yarn: beta_fast")
    slow_rotations: float = Field(default=1.0, gt=0, le=1e6, description="yarn: beta_slow")
    attention_factor: float = Field(
        default=0.0, ge=0, le=1e3, description="yarn; 0: 0.1 ln(factor) + 1"
    )
    whole_rotations: bool = Field(
        default=True, description="yarn: whether the ramp's ends are rounded outwards"
    )

    @model_validator(mode="after")
    def _means_something(self) -> "RopeSpec":
        of = {
            "factor": ("linear", "dynamic", "llama3", "yarn"),
            "original_positions": ("llama3", "yarn"),
            "low_frequency_factor": ("llama3",),
            "high_frequency_factor": ("llama3",),
            "fast_rotations": ("yarn",),
            "slow_rotations": ("yarn",),
            "attention_factor": ("yarn",),
            "whole_rotations": ("yarn",),
        }
        for name, scalings in of.items():
            is_set = getattr(self, name) != type(self).model_fields[name].default
            if is_set and self.scaling not in scalings:
                raise ValueError(
                    f"{name} belongs to the scaling {' or '.join(scalings)}, not {self.scaling!r}"
                )
        if self.scaling in ("llama3", "yarn") and not self.original_positions:
            raise ValueError(f"the scaling {self.scaling!r} needs original_positions")
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError("low_frequency_factor must be less than high_frequency_factor")
        if self.slow_rotations > self.fast_rotations:
            raise ValueError("slow_rotations must not be more than fast_rotations")
        return self


class ModelSpec(Section):
    """A GPT: pre-norm transformer blocks between a token embedding and a linear head."""

    layers: int = Field(ge=1, le=1024, description="transformer blocks")
    width: int = Field(ge=8, le=65536)
    heads: int = Field(ge=1, le=512)
    context: int = Field(ge=8, le=1 << 20, description="tokens in a sequence")
    vocabulary: int = Field(ge=2, le=1 << 24)
    initial: str = Field(
        default="",
        pattern="^([0-9a-f]{64})?$",
        description="digest of given weights to start from; empty: random ones from the seed",
    )
    norm: Norm = "layer"
    norm_epsilon: float = Field(default=1e-5, gt=0, le=1)
    position: Position = "learned"
    rope: RopeSpec = RopeSpec()
    feed_forward: FeedForward = "gelu"
    feed_forward_width: int = Field(default=0, ge=0, le=1 << 20, description="0: 4 times the width")
    kv_heads: int = Field(
        default=0, ge=0, le=512, description="heads of keys and values, which groups of heads share"
    )
    head_width: int = Field(default=0, ge=0, le=4096, description="0: the heads share the width")
    attention_bias: bool = True
    feed_forward_bias: bool = True
    query_key_norm: bool = Field(default=False, description="of each head's queries and keys")
    tied_head: bool = Field(
        default=False,
        description="the head is the token embedding: both ends keep a copy, equal bit for bit",
    )
    written_width: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="channels that blocks write, which alone travel between stages; the others "
        "hold a fixed code of each token and its place; 0: all",
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> "ModelSpec":
        if not self.head_width and self.width % self.heads:
            raise ValueError(
                f"heads ({self.heads}) must divide width ({self.width}), "
                f"or head_width says how wide each is"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        return self

    @model_validator(mode="after")
    def _some_channels_are_written(self) -> "ModelSpec":
        if not self.written_width:
            return self
        if self.written_width >= self.width:
            raise ValueError(
                f"written_width ({self.written_width}) must be less than width ({self.width}); 0 "
                f"stands for all channels"
            )
        needed = CODE_CHANNELS_PER_BIT * (self.vocabulary - 1).bit_length()
        if self.code_width < needed:
            raise ValueError(
                f"written_width ({self.written_width}) leaves too few channels for the code that "
                f"tells tokens apart: with vocabulary ({self.vocabulary}) at most "
                f"{max(self.width - needed, 0)} may be written of width ({self.width})"
            )
        for name, is_asked in (("tied_head", self.tied_head), ("initial", bool(self.initial))):
            if is_asked:
                raise ValueError(
                    f"{name} with written_width: the token embedding has the written channels "
                    f"alone, and given weights have all"
                )
        return self

    @model_validator(mode="after")
    def _choices_go_together(self) -> "ModelSpec":
        if self.position != "rope" and self.rope != RopeSpec():
            raise ValueError('[model.rope] is stated, and position is not "rope"')
        if self.position == "rope" and self.each_head % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels: heads of width {self.each_head} have "
                f"one too many"
            )
        if self.rope.positions and self.context > self.rope.positions:
            raise ValueError(
                f"context ({self.context}) is longer than the {self.rope.positions} positions that "
                f"the model is made for (rope.positions)"
            )
        if self.query_key_norm and self.norm != "rms":
            raise ValueError('query_key_norm is an RMS norm, and norm is not "rms"')
        return self

    @property
    def layer_count(self) -> int:
        """Embedding, blocks and head together."""
        return self.layers + 2

    @property
    def boundary_width(self) -> int:
        """Channels that one layer hands to the next: all, or those that blocks write."""
        return self.written_width or self.width

    @property
    def code_width(self) -> int:
        """Channels that hold a fixed code of tokens (`train.model.narrow.fixed_code`)."""
        return self.width - self.boundary_width

    @property
    def each_head(self) -> int:
        """Channels of one head's queries, keys or values."""
        return self.head_width or self.width // self.heads

    @property
    def query_width(self) -> int:
        """Channels of the queries of all heads together."""
        return self.heads * self.each_head

    @property
    def key_width(self) -> int:
        """Channels of the keys of all groups together, and of their values."""
        return (self.kv_heads or self.heads) * self.each_head

    @property
    def hidden_width(self) -> int:
        """The width of a feed-forward network's hidden layer."""
        return self.feed_forward_width or 4 * self.width

    def stated(self) -> dict[str, Any]:
        """What a run's bytes hold: all values but the choices that are the defaults."""
        values = self.model_dump(mode="python")
        for name, field in type(self).model_fields.items():
            if name in _ALWAYS_STATED:
                continue
            if getattr(self, name) == field.default:
                del values[name]
        if "rope" in values:
            for name, field in RopeSpec.model_fields.items():
                if getattr(self.rope, name) == field.default:
                    del values["rope"][name]
        return values


_ALWAYS_STATED = ("layers", "width", "heads", "context", "vocabulary", "initial")

_LLAMA: Mapping[str, Any] = {
    "norm": "rms",
    "position": "rope",
    "feed_forward": "swiglu",
    "attention_bias": False,
    "feed_forward_bias": False,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "norm_epsilon": 1e-6, "query_key_norm": True, "rope": {"theta": 1e6}},
}
"""What each family chooses. By default its gated networks are as large as GPT-2's networks of two
matrices: their hidden width is two thirds of four times the width, rounded up to a multiple of 8.
"""


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `[model]`, with what `preset` stands for in its place, unless stated.

    Raises ValueError for a preset that does not exist.
    """
    stated = dict(values)
    name = stated.pop("preset", None)
    if name is None:
        return stated
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(map(repr, PRESETS))}")
    filled = {**PRESETS[name], **stated}
    chosen = PRESETS[name].get("rope")
    if chosen is not None and isinstance(stated.get("rope"), dict):
        filled["rope"] = {**chosen, **stated["rope"]}
    width = filled.get("width")
    is_gated = filled.get("feed_forward") == "swiglu"
    if is_gated and "feed_forward_width" not in filled and isinstance(width, int):
        filled["feed_forward_width"] = 8 * -(-width // 3)
    return filled

"""A model as one GGUF file, which llama.cpp and what is built on it read.

Names and keys are those of the `gguf` package. Matrices are [outputs, inputs], as ours are. Llama's
rotary pairs are channels side by side there, and half a head apart here. So rows of queries and
keys change places. Values stay fp32; llama.cpp's own tools make smaller ones of them.
"""

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as StandardTokenizer
from torch import Tensor

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.ports.packages import how_to_install
from p2p_dtfm.train.data.byte_pairs import KNOWN_PATTERNS, SYMBOLS
from p2p_dtfm.train.data.chat.template import read_template
from p2p_dtfm.train.data.prepare import TOKENIZER_NAME
from p2p_dtfm.train.data.tokenizer import Tokenizer
from p2p_dtfm.train.data.tokens.sentence_pieces import BYTE_PIECES
from p2p_dtfm.train.hugging_face.export import (
    ExportedModel,
    ends_of_texts,
    model_from,
    placed_tensors,
    places_of,
    require_room,
    require_tied,
    special_tokens,
)
from p2p_dtfm.train.hugging_face.families import family_of, parts_of
from p2p_dtfm.train.hugging_face.gguf_pieces import describe_pieces
from p2p_dtfm.train.hugging_face.model_import import Progress
from p2p_dtfm.train.hugging_face.new_place import made_whole, require_new
from p2p_dtfm.train.hugging_face.tokenizer_json import start_of_texts, tokenizer_json
from p2p_dtfm.train.model.block import attention_factor, frequencies
from p2p_dtfm.train.model.gpt import layer_count

_SPLITTING = {"": "gpt-2", "llama3": "llama-bpe", "qwen2": "qwen2"}
_ZERO_BYTE = "\u0100"
"""The symbol of the byte that ends a text, as byte-level tokenizers write it."""
_ROPE_FACTORS = "rope_freqs.weight"
_BESIDE_TENSORS_BYTES = 1 << 20


def export_gguf(
    source: Path,
    out: Path,
    tokenizer: Tokenizer | None,
    progress: Progress = lambda done_bytes, total_bytes: None,
    origin: Path | None = None,
) -> None:
    """Write the checkpoint of one step, or an imported model, into the file `out`.

    Raises `UserError`, also for a model that llama.cpp would compute in another way. The file
    appears whole or not at all.
    """
    library = require_library()
    require_new(out)
    model = model_from(source, origin)
    family = family_of(model.spec.model)
    _require_known(model.spec.model, family)
    require_tied(model)
    with made_whole(out) as made:
        tensors = list(_tensors(model.spec, family, library))
        size_bytes = 4 * sum(int(np.prod(shape)) for _, shape in tensors)
        require_room(made, size_bytes + _BESIDE_TENSORS_BYTES)
        writer = library.GGUFWriter(made, family)
        _describe(writer, model, library)
        for name, shape in tensors:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        try:
            _describe_tokens(writer, model, tokenizer, library)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()  # here texts become bytes, if they can
        except (LookupError, TypeError, AttributeError, ValueError) as error:  # a stranger's file
            raise UserError(
                f"the files of the model that the run began from cannot be used: {error!r}",
                "export for transformers: --format hf",
            ) from error
        writer.write_ti_data_to_file()
        done_bytes = 0
        for values in _values(model, family):
            writer.write_tensor_data(values)
            done_bytes += values.nbytes
            progress(done_bytes, size_bytes)
        writer.close()


def require_library() -> Any:
    """The package `gguf`. Raises `UserError`."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(
            "--format gguf needs the package gguf, which is not installed here",
            (how_to_install("gguf"), "or export for transformers: --format hf"),
        ) from error


def _require_known(model: ModelSpec, family: str) -> None:
    rope = model.rope
    unlike = [
        (family == "qwen3" and model.attention_bias, "attention_bias is true"),
        (family == "qwen3" and rope.scaling == "llama3", "rope.scaling is 'llama3'"),
        (not rope.whole_rotations, "rope.whole_rotations is false"),
    ]
    reasons = [reason for is_so, reason in unlike if is_so]
    if reasons:
        raise UserError(
            f"llama.cpp has no model like this one: its {family} comes nearest, and "
            f"{', '.join(reasons)}",
            "export for transformers: --format hf",
        )


# what is said of the model ------------------------------------------------------------------------


def _describe(writer: Any, model: ExportedModel, library: Any) -> None:
    spec = model.spec
    shape = spec.model
    writer.add_name(spec.name)
    writer.add_description(f"run {model.run.digest()}, after step {model.step}")
    writer.add_file_type(library.LlamaFileType.ALL_F32)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.rope.positions or shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads or shape.heads)
    if shape.norm == "layer":
        writer.add_layer_norm_eps(shape.norm_epsilon)
        return
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_key_length(shape.each_head)
    writer.add_value_length(shape.each_head)
    _describe_rope(writer, shape, library)


def _describe_rope(writer: Any, shape: ModelSpec, library: Any) -> None:
    """`dynamic` needs no key: it begins beyond the positions that the model is made for."""
    rope = shape.rope
    writer.add_rope_dimension_count(shape.each_head)
    writer.add_rope_freq_base(rope.theta)
    if rope.scaling == "linear":
        writer.add_rope_scaling_type(library.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    if rope.scaling == "yarn":
        writer.add_rope_scaling_type(library.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.factor)
        writer.add_rope_scaling_orig_ctx_len(rope.original_positions)
        writer.add_rope_scaling_yarn_beta_fast(rope.fast_rotations)
        writer.add_rope_scaling_yarn_beta_slow(rope.slow_rotations)
        usual = rope.model_copy(update={"attention_factor": 0.0})
        # llama.cpp multiplies with what follows from the factor alone
        more = attention_factor(rope) / attention_factor(usual)
        if more != 1.0:
            writer.add_rope_scaling_attn_factors(more)


def _describe_tokens(
    writer: Any, model: ExportedModel, tokenizer: Tokenizer | None, library: Any
) -> None:
    content = _tokenizer_content(model, tokenizer)
    if content is None:
        writer.add_tokenizer_model("no_vocab")
        return
    kinds = library.TokenType
    by_id = {token: piece for piece, token in content["model"]["vocab"].items()}
    special = {
        added["id"]: (added["content"], kinds.CONTROL if added["special"] else kinds.USER_DEFINED)
        for added in content.get("added_tokens") or ()
    }
    pieces, types = [], []
    for token in range(model.spec.model.vocabulary):
        normal = (by_id[token], kinds.NORMAL) if token in by_id else (f"[PAD{token}]", kinds.UNUSED)
        piece, kind = special.get(token, normal)
        pieces.append(piece)
        types.append(kind)
    if content["model"].get("byte_fallback"):
        describe_pieces(writer, content, pieces, types, kinds)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(splitting := _splitting(content))
        writer.add_token_list(pieces)
        writer.add_token_types(types)
        writer.add_token_merges(_merges(content))
        _require_same_words(content, splitting)
    _describe_special(writer, model, content, tokenizer)


def _tokenizer_content(model: ExportedModel, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """The content of tokenizer.json, with its special tokens if the model came with them."""
    origin = model.origin / TOKENIZER_NAME if model.origin is not None else None
    try:
        if origin is not None and origin.is_file():
            content: dict[str, Any] = json.loads(origin.read_bytes())
            return content
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {origin}: {error}", "import the model anew") from error
    return json.loads(tokenizer_json(tokenizer)) if tokenizer is not None else None


def _splitting(content: Mapping[str, Any]) -> str:
    parts = (content.get("pre_tokenizer") or {}).get("pretokenizers") or ()
    if any(part.get("type") == "Digits" for part in parts):
        return "smollm"
    patterns = (part.get("pattern", {}).get("Regex", "") for part in parts)
    known = next((KNOWN_PATTERNS[it] for it in patterns if it in KNOWN_PATTERNS), "")
    return _SPLITTING[known]


def _require_same_words(content: Mapping[str, Any], splitting: str) -> None:
    """Require that llama.cpp splits texts into the same tokens. Where texts are split as Llama 3's,
    it takes a word that is a token as it is; elsewhere it merges. Both are the same if merges lead
    to all such words. Raises `UserError`."""
    model = content["model"]
    if bool(model.get("ignore_merges")) == (splitting == "llama-bpe") or not model.get("merges"):
        return
    texts = [text for piece in model["vocab"] if (text := _text_of(piece)) is not None]
    ways = []
    for ignores in (False, True):
        plain = {"model": {**model, "ignore_merges": ignores}, "added_tokens": []}
        try:
            standard = StandardTokenizer.from_str(json.dumps({**content, **plain}))
        except Exception as error:  # the library raises no narrower class
            raise ValueError(str(error)) from error
        ways.append([each.ids for each in standard.encode_batch_fast(texts)])
    for text, merged, whole in zip(texts, *ways, strict=True):
        if merged != whole:
            raise UserError(
                f"llama.cpp would split texts into other tokens: no merges lead to {text[:40]!r}, "
                f"which is a token, and by how words are split it decides whether that counts",
                "export for transformers: --format hf",
            )


def _text_of(piece: str) -> str | None:
    """The text of a piece; None if it is no text, or is not spelt in symbols of bytes."""
    try:
        return bytes(SYMBOLS[symbol] for symbol in piece).decode("utf-8")
    except (KeyError, UnicodeDecodeError):
        return None


def _merges(content: Mapping[str, Any]) -> list[str]:
    merges = content["model"].get("merges") or ()
    words = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    # A file without a merge is refused. These two bytes occur in no UTF-8 text.
    return words or ["\u00ff \u00fe"]


def _describe_special(
    writer: Any, model: ExportedModel, content: Mapping[str, Any], tokenizer: Tokenizer | None
) -> None:
    stated = special_tokens(model.origin)
    known = content["model"]["vocab"]
    usual = known.get(_ZERO_BYTE, known.get(BYTE_PIECES[0]))
    end = usual if tokenizer is None else tokenizer.end_of_document
    start = start_of_texts(content)
    begins = stated.get("bos_token_id", None if stated else end)
    say = (
        (writer.add_bos_token_id, begins if start is None else start),
        (writer.add_pad_token_id, stated.get("pad_token_id")),
    )
    for add, token in say:
        if _is_token(token, model):
            add(token)
    ends = ends_of_texts(model.origin, tokenizer) if stated else [end]
    _describe_ends(writer, [token for token in ends if _is_token(token, model)], content)
    writer.add_add_bos_token(start is not None)
    template = None if model.origin is None else read_template(model.origin)
    if template is not None:
        writer.add_chat_template(template)


def _is_token(token: Any, model: ExportedModel) -> bool:
    """Whether a token is the model's. Where there is none, files say -1 or one beyond the
    vocabulary."""
    return isinstance(token, int) and 0 <= token < model.spec.model.vocabulary


def _describe_ends(writer: Any, tokens: list[int], content: Mapping[str, Any]) -> None:
    """Write the tokens that end a text. The first ends a text; others end a turn or a message."""
    by_id = {each["id"]: each["content"] for each in content.get("added_tokens") or ()}
    if tokens:
        writer.add_eos_token_id(tokens[0])
    others = tokens[1:]
    messages = [token for token in others if "eom" in by_id.get(token, "")]
    turns = [token for token in others if token not in messages]
    if turns:
        writer.add_eot_token_id(turns[0])
    if messages:
        writer.add_eom_token_id(messages[0])


# tensors ------------------------------------------------------------------------------------------


def _tensors(spec: RunSpec, family: str, library: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, in the order of `_values`."""
    model = spec.model
    architecture = library.MODEL_ARCH[family.upper()]
    names = library.get_tensor_name_map(architecture, model.layers)
    if model.rope.scaling == "llama3":
        yield _ROPE_FACTORS, (model.each_head // 2,)
    for part in places_of(spec, parts_of):
        theirs = names.get_name(part.name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, part.name
        yield theirs, part.shape


def _values(model: ExportedModel, family: str) -> Iterator[np.ndarray]:
    """The values of all tensors, fp32, one tensor after another."""
    shape = model.spec.model
    if shape.rope.scaling == "llama3":
        plain = frequencies(shape.rope.model_copy(update={"scaling": "none"}), shape.each_head)
        yield (plain / frequencies(shape.rope, shape.each_head)).numpy()
    for layer in range(layer_count(model.spec)):
        for part, tensor in placed_tensors(model, layer, parts_of):
            turned = family == "llama" and (".q_proj." in part.name or ".k_proj." in part.name)
            placed = side_by_side(tensor, shape.each_head) if turned else tensor
            yield placed.detach().to(torch.float32).contiguous().numpy()


def side_by_side(rows: Tensor, head_width: int) -> Tensor:
    """Rows [heads * head_width, ...] in another order: rotary pairs, which lie half a head apart,
    come side by side."""
    heads = rows.shape[0] // head_width
    apart = rows.reshape(heads, 2, head_width // 2, *rows.shape[1:])
    return apart.transpose(1, 2).reshape(rows.shape)

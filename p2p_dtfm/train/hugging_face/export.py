"""A model as Hugging Face's `transformers` knows it: GPT2LMHeadModel, in a directory.

The architecture is the same as ours but for names, for matrices stored as [inputs, outputs], and
for the head, which in GPT-2 is usually the token embedding itself; ours has a matrix of its own,
so the configuration says `tie_word_embeddings = false`.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.data.tokenizer import END_OF_DOCUMENT, Tokenizer
from p2p_dtfm.train.hugging_face.tokenizer_json import tokenizer_json
from p2p_dtfm.train.model.checkpoint import load_layer, read_manifest
from p2p_dtfm.train.model.gpt import layer_count, layer_entries
from p2p_dtfm.train.model.tensor_file import Entry, entry_bytes, file_bytes, write_tensors

LAYER_NORM_EPSILON = 1e-5
"""The default of torch.nn.LayerNorm, which train.model keeps."""

WEIGHTS_NAME = "model.safetensors"
CONFIGURATION_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"

_EMBEDDING = {"token.weight": "transformer.wte.weight", "position.weight": "transformer.wpe.weight"}
_HEAD = {
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "logits.weight": "lm_head.weight",
}
_BLOCK = {
    "attention_norm": "ln_1",
    "attention_input": "attn.c_attn",
    "attention_output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward_input": "mlp.c_fc",
    "feed_forward_output": "mlp.c_proj",
}

Progress = Callable[[int, int], None]
"""Bytes done, bytes in all."""


class Naming(Protocol):
    def __call__(self, model: ModelSpec, layer: int, name: str) -> tuple[str, bool]: ...


def hugging_face_name(model: ModelSpec, layer: int, name: str) -> tuple[str, bool]:
    """Where GPT2LMHeadModel keeps a parameter of ours, and whether transposed."""
    if layer == 0:
        return _EMBEDDING[name], False
    if layer > model.layers:
        return _HEAD[name], False
    part, kind = name.rsplit(".", 1)
    is_matrix = kind == "weight" and not part.endswith("norm")  # GPT-2's Conv1D is [in, out]
    return f"transformer.h.{layer - 1}.{_BLOCK[part]}.{kind}", is_matrix


def own_name(model: ModelSpec, layer: int, name: str) -> tuple[str, bool]:
    """Our names in one file for the whole model."""
    return f"layer.{layer}.{name}", False


def export_hugging_face(
    checkpoint: Path,
    out: Path,
    tokenizer: Tokenizer | None,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> None:
    """Make the directory `out` from the checkpoint of one step. Raises `UserError`.

    Without a tokenizer the directory holds the model alone. `out` appears whole or not at all.
    """
    _require_new(out)
    spec = read_manifest(checkpoint).spec()
    temporary = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_model(checkpoint, temporary / WEIGHTS_NAME, hugging_face_name, progress)
        _write_json(temporary / CONFIGURATION_NAME, configuration(spec, tokenizer))
        if tokenizer is not None:
            (temporary / TOKENIZER_NAME).write_bytes(tokenizer_json(tokenizer))
            _write_json(temporary / "tokenizer_config.json", _tokenizer_configuration(spec))
        os.replace(temporary, out)
    except OSError as error:
        raise _not_written(out, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export_safetensors(
    checkpoint: Path,
    out: Path,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> None:
    """Write all parameters, under our names, into one file. Raises `UserError`."""
    _require_new(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write_model(checkpoint, out, own_name, progress)
    except OSError as error:
        raise _not_written(out, error) from error


def configuration(spec: RunSpec, tokenizer: Tokenizer | None) -> dict[str, object]:
    """The content of config.json."""
    model = spec.model
    end = None if tokenizer is None else int(tokenizer.encode(END_OF_DOCUMENT)[0])
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocabulary,
        "n_positions": model.context,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": 4 * model.width,
        "activation_function": "gelu_new",  # the tanh approximation
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "tie_word_embeddings": False,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": end,
        "eos_token_id": end,
        "use_cache": True,
        "dtype": "float32",
    }


def _tokenizer_configuration(spec: RunSpec) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.model.context,
        "clean_up_tokenization_spaces": False,  # text comes back as it was
    }


def _write_model(checkpoint: Path, path: Path, place: Naming, progress: Progress) -> None:
    manifest = read_manifest(checkpoint)
    spec = manifest.spec()
    entries = [entry for layer in range(layer_count(spec)) for entry in _placed(spec, layer, place)]
    metadata = {
        "format": "pt",
        "run": manifest.run_digest,
        "run_name": spec.name,
        "step": str(manifest.step),
    }
    total_bytes = file_bytes(entries, metadata)
    _require_room(path, total_bytes)
    write_tensors(
        path, entries, metadata, _parameters(checkpoint, spec, place, progress, total_bytes)
    )
    progress(total_bytes, total_bytes)


def _placed(spec: RunSpec, layer: int, place: Naming) -> list[Entry]:
    placed = []
    for name, shape in layer_entries(spec, layer):
        target, is_transposed = place(spec.model, layer, name)
        placed.append((target, shape[::-1] if is_transposed else shape))
    return placed


def _parameters(
    checkpoint: Path, spec: RunSpec, place: Naming, progress: Progress, total_bytes: int
) -> Iterator[Tensor]:
    done_bytes = 0
    for layer in range(layer_count(spec)):
        state = load_layer(checkpoint, layer)
        for name, parameter in state.module.named_parameters():
            _, is_transposed = place(spec.model, layer, name)
            yield parameter.t() if is_transposed else parameter
            done_bytes += entry_bytes((name, tuple(parameter.shape)))
            progress(done_bytes, total_bytes)


def _require_new(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not empty", "choose a new place for --out")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} exists already", "choose a new place for --out")


def _require_room(path: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"the model needs {needed_bytes / 1e6:,.0f} MB, and {path.parent} has "
            f"{free_bytes / 1e6:,.0f} MB free",
            "free space there, or name a directory on another disk with --out",
        )


def _not_written(out: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {out}: {error.strerror or error}",
        "choose a directory that you may write to for --out, with enough space",
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

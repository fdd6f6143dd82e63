"""A model as Hugging Face's `transformers` knows it, in a directory.

It is made from a run's checkpoint, or from what `import` wrote. GPT-2's head is tied to the token
embedding. Ours has a matrix of its own unless it is tied, so the configuration says
`tie_word_embeddings`.
"""

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text
from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.train.data.prepare import TOKENIZER_NAME
from p2p_dtfm.train.data.tokenizer import Tokenizer
from p2p_dtfm.train.hugging_face.configuration import CONFIGURATION_NAME, configuration_of
from p2p_dtfm.train.hugging_face.families import Part, family_of, own_parts, parts_of
from p2p_dtfm.train.hugging_face.model_card import CARD_NAME, KnownOfModel, model_card
from p2p_dtfm.train.hugging_face.model_import import (
    GENERATION_NAME,
    INITIAL_NAME,
    ORIGIN_FILES,
    RUN_SPEC_NAME,
    Progress,
)
from p2p_dtfm.train.hugging_face.new_place import made_whole, require_new, seen_beside
from p2p_dtfm.train.hugging_face.tokenizer_json import ORIGIN_NAME, json_of, tokenizer_json
from p2p_dtfm.train.hugging_face.weights import WEIGHTS_NAME
from p2p_dtfm.train.model.checkpoint import read_manifest
from p2p_dtfm.train.model.gpt import build_plain_layer, layer_count, plain_entries
from p2p_dtfm.train.model.initial_state import given_tensors, initial_paths
from p2p_dtfm.train.model.kinds.registry import require_gpt
from p2p_dtfm.train.model.lora.adapted import merged_into
from p2p_dtfm.train.model.lora.frozen_base import computing_layer
from p2p_dtfm.train.model.narrow.whole_layers import made_whole as whole_layer
from p2p_dtfm.train.model.narrow.whole_layers import whole_spec
from p2p_dtfm.train.model.tensor_file import Entry, entry_bytes, file_bytes, write_tensors

Naming = Callable[[ModelSpec, int, str, tuple[int, ...]], list[Part]]
NOTHING_TOLD = KnownOfModel()
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class ExportedModel:
    """A model that can be exported."""

    spec: RunSpec
    step: int
    layer: Callable[[int], nn.Module]
    """Raises `UserError` for a layer whose file is missing or damaged."""
    origin: Path | None = None
    """The directory of the model's own files that `import` kept."""
    of_run: RunSpec | None = None
    """The run's own spec, where `spec` is a plain GPT that computes the same. None: `spec`."""

    @property
    def run(self) -> RunSpec:
        """The run that trained the model."""
        return self.of_run or self.spec


def is_imported(directory: Path) -> bool:
    """Whether `import` made the directory."""
    return (directory / RUN_SPEC_NAME).is_file() and (directory / INITIAL_NAME).is_dir()


def require_imported(directory: Path) -> None:
    """Raises `UserError` for a directory that `import` did not make."""
    if not is_imported(directory):
        raise UserError(
            f"{directory} is no directory that import made",
            "give the directory of the run spec, with initial/ beside it",
        )


def model_in(directory: Path) -> ExportedModel:
    """The model of one step's checkpoint, or of what `import` wrote. Raises `UserError`."""
    if not is_imported(directory):
        manifest = read_manifest(directory)
        spec = manifest.spec()
        require_gpt(spec, "export")
        return ExportedModel(
            whole_spec(spec), manifest.step, lambda n: _merged(directory, spec, n), of_run=spec
        )
    path = directory / RUN_SPEC_NAME
    try:
        spec = parse_run_spec(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}", "import the model anew") from error
    files = initial_paths(directory / INITIAL_NAME, spec)[1:]

    def layer_of(layer: int) -> nn.Module:
        try:
            module = build_plain_layer(spec, layer)
            module.load_state_dict(dict(given_tensors(spec, layer, files[layer])))
            return module
        except (OSError, PeerFault) as error:
            raise UserError(
                f"{files[layer]} cannot be used: {error}", "import the model anew"
            ) from error

    return ExportedModel(spec, 0, layer_of, directory / ORIGIN_NAME)


def _merged(directory: Path, spec: RunSpec, layer: int) -> nn.Module:
    """A checkpoint's layer as one of a plain GPT. Adapters are added to what they lie beside."""
    module = computing_layer(directory, layer)
    if spec.trains_adapters:
        return merged_into(build_plain_layer(spec, layer), module)
    return whole_layer(spec, layer, module)


def origin_of(imported: Path) -> Path:
    """The directory of the model's own files that `import` kept there. Raises `UserError`."""
    require_imported(imported)
    return imported / ORIGIN_NAME


def model_from(source: Path, origin: Path | None) -> ExportedModel:
    """Like `model_in`; the model's own files in `origin` are exported with it."""
    model = model_in(source)
    return model if origin is None else replace(model, origin=origin)


def export_hugging_face(
    source: Path,
    out: Path,
    tokenizer: Tokenizer | None,
    progress: Progress = lambda done_bytes, total_bytes: None,
    origin: Path | None = None,
    told: KnownOfModel = NOTHING_TOLD,
) -> None:
    """Make the directory `out` from the checkpoint of one step, or from an imported model.

    Without a tokenizer the directory holds the model alone. An imported model takes its own files
    along; for a checkpoint the files in `origin` are taken along. `told` goes into the model's
    card. `out` appears whole or not at all. Raises `UserError`.
    """
    require_new(out)
    model = model_from(source, origin)
    family_of(model.spec.model)
    require_tied(model)
    with made_whole(out) as made:
        made.mkdir()
        _write_model(model, made / WEIGHTS_NAME, parts_of, progress)
        if tokenizer is not None:
            file = tokenizer_json(tokenizer)
            (made / TOKENIZER_NAME).write_bytes(file)
            said = _tokenizer_configuration(model.spec, tokenizer, file)
            _write_json(made / "tokenizer_config.json", said)
        if model.origin is not None and model.origin.is_dir():
            _copy_origin(model.origin, made)
            _end_generation(made / GENERATION_NAME, tokenizer)
        _write_json(made / CONFIGURATION_NAME, configuration(model, tokenizer))
        card = model_card(model.run, model.step, told)
        (made / CARD_NAME).write_text(card, encoding="utf-8")


def export_safetensors(
    source: Path,
    out: Path,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> None:
    """Write all parameters, under our names, into one file. Raises `UserError`."""
    require_new(out)
    with made_whole(out) as made:
        _write_model(model_in(source), made, own_parts, progress)


def configuration(model: ExportedModel, tokenizer: Tokenizer | None) -> dict[str, object]:
    """The content of config.json."""
    end = None if tokenizer is None else tokenizer.end_of_document
    stated = special_tokens(model.origin)
    ends = ends_of_texts(model.origin, tokenizer)
    if stated and end is not None and end not in ends_of(model.origin):
        stated = {**stated, "eos_token_id": ends if ends[1:] else end}
    start = None if tokenizer is None else tokenizer.start_of_document
    begins = {} if start is None else {"bos_token_id": start}
    return configuration_of(model.spec.model, end, {**begins, **stated})


def special_tokens(origin: Path | None) -> Mapping[str, Any]:
    """The special tokens that the model had where it came from."""
    return {} if origin is None else _special_tokens(origin / CONFIGURATION_NAME)


def ends_of(origin: Path | None) -> list[int]:
    """The tokens that end a text, as the model's configurations (also of generation) state them."""
    if origin is None:
        return []
    names = (CONFIGURATION_NAME, GENERATION_NAME)
    return list(dict.fromkeys(end for name in names for end in _ends_in(origin / name)))


def _ends_in(path: Path) -> list[int]:
    stated = _special_tokens(path).get("eos_token_id")
    listed = stated if isinstance(stated, list) else [stated]
    return [token for token in listed if isinstance(token, int)]


def ends_of_texts(origin: Path | None, tokenizer: Tokenizer | None) -> list[int]:
    """The tokens that end a text of the exported model. If its run was trained with another end
    than the model states, that end comes first."""
    ends = ends_of(origin)
    end = None if tokenizer is None else tokenizer.end_of_document
    return ends if end is None or end in ends else [end, *ends]


def _special_tokens(path: Path) -> dict[str, Any]:
    """The special tokens that a file states. What is neither a token nor a list of tokens is left
    out: the file may be a stranger's."""
    content = json_of(path)
    return {
        name: content[name]
        for name in _SPECIAL_TOKENS
        if name in content and _are_tokens(content[name])
    }


def _are_tokens(stated: Any) -> bool:
    each = stated if isinstance(stated, list) else [stated]
    return all(token is None or isinstance(token, int) for token in each)


def _copy_origin(origin: Path, to: Path) -> None:
    """Copy all own files except the configuration, which is written anew."""
    for name in ORIGIN_FILES:
        if name != CONFIGURATION_NAME and (origin / name).is_file():
            shutil.copyfile(origin / name, to / name)


def _end_generation(path: Path, tokenizer: Tokenizer | None) -> None:
    """Add the end of the run's texts to the model's generation settings, if it has any.
    `transformers` stops at what these state, whatever config.json says."""
    stated = json_of(path)
    ends = _ends_in(path)
    if stated and tokenizer is not None and tokenizer.end_of_document not in ends:
        _write_json(path, {**stated, "eos_token_id": [tokenizer.end_of_document, *ends]})


def _tokenizer_configuration(spec: RunSpec, tokenizer: Tokenizer, file: bytes) -> dict[str, object]:
    named = {"bos_token": tokenizer.start_of_document, "eos_token": tokenizer.end_of_document}
    vocabulary = json.loads(file)["model"]["vocab"]
    pieces = {name: tokenizer.decode([it]) for name, it in named.items() if it is not None}
    return {
        # without the zero byte, which a vocabulary spells otherwise
        **{name: it for name, it in pieces.items() if vocabulary.get(it) == named[name]},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.model.context,
        "clean_up_tokenization_spaces": False,  # text comes back as it was
    }


def _write_model(model: ExportedModel, path: Path, place: Naming, progress: Progress) -> None:
    spec = model.spec
    entries: list[Entry] = [(part.name, part.stored_shape) for part in places_of(spec, place)]
    metadata = {
        "format": "pt",
        "run": model.run.digest(),
        "run_name": spec.name,
        "step": str(model.step),
    }
    total_bytes = file_bytes(entries, metadata)
    require_room(path, total_bytes)
    write_tensors(path, entries, metadata, _parameters(model, place, progress, total_bytes))
    progress(total_bytes, total_bytes)


def places_of(spec: RunSpec, place: Naming) -> Iterator[Part]:
    """The places of all parameters of the whole model, in the order of `placed_tensors`."""
    for layer in range(layer_count(spec)):
        for name, shape in plain_entries(spec, layer):
            yield from place(spec.model, layer, name, shape)


def placed_tensors(
    model: ExportedModel, layer: int, place: Naming
) -> Iterator[tuple[Part, Tensor]]:
    """The parameters of a layer, each cut into as many tensors as it has places."""
    for name, parameter in model.layer(layer).named_parameters():
        parts = place(model.spec.model, layer, name, tuple(parameter.shape))
        rows = [part.shape[0] for part in parts]
        yield from zip(parts, parameter.split(rows) if rows else (), strict=True)


def _parameters(
    model: ExportedModel, place: Naming, progress: Progress, total_bytes: int
) -> Iterator[Tensor]:
    done_bytes = 0
    for layer in range(layer_count(model.spec)):
        for part, tensor in placed_tensors(model, layer, place):
            yield tensor.t() if part.is_transposed else tensor
            done_bytes += entry_bytes((part.name, part.shape))
            progress(done_bytes, total_bytes)


def require_tied(model: ExportedModel) -> None:
    """Require that both copies of a shared matrix have the same bits. Raises `UserError`."""
    if not model.spec.model.tied_head:
        return
    embedding = model.layer(0).get_parameter("token.weight")
    head = model.layer(layer_count(model.spec) - 1).get_parameter("logits.weight")
    if not torch.equal(embedding, head):
        raise UserError(
            "the head is tied to the token embedding, and their files hold unlike matrices",
            "use another checkpoint: this one has layers of different swarms",
        )


def require_room(path: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"the model needs {bytes_text(needed_bytes)}, and {seen_beside(path)} has "
            f"{bytes_text(free_bytes)} free",
            "free space there, or name a directory on another disk with --out",
        )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

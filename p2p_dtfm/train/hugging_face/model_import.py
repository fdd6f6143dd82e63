"""A model of Hugging Face's as the start of a run.

run.toml         the run spec
initial/         the weights, by layer
tokenizer.json   the tokenizer as this program reads it
origin/          what else the model's directory says: configuration, tokenizer, special tokens
"""

import json
import math
import re
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.core.protocol.sections.lora_spec import LoraSpec
from p2p_dtfm.train.data.corpus import STANDARD_LIBRARY
from p2p_dtfm.train.data.prepare import TOKENIZER_NAME, open_prepared
from p2p_dtfm.train.data.tokenizer import ByteTokenizer, Tokenizer, require_tokenizer_of
from p2p_dtfm.train.hugging_face.configuration import (
    CONFIGURATION_NAME,
    Configuration,
    read_configuration,
)
from p2p_dtfm.train.hugging_face.families import (
    HEAD_NAME,
    PREFIXES,
    TOKEN_NAMES,
    Part,
    parts_of,
)
from p2p_dtfm.train.hugging_face.new_place import made_whole, require_new
from p2p_dtfm.train.hugging_face.origin_files import lies_in, pack
from p2p_dtfm.train.hugging_face.tokenizer_json import ORIGIN_NAME, read_tokenizer_json
from p2p_dtfm.train.hugging_face.training_options import require_model, require_options
from p2p_dtfm.train.hugging_face.weights import Weights
from p2p_dtfm.train.model.gpt import layer_count, plain_entries
from p2p_dtfm.train.model.initial_state import ORIGIN_LIMIT_BYTES, write_initial

RUN_SPEC_NAME = "run.toml"
INITIAL_NAME = "initial"
GENERATION_NAME = "generation_config.json"
_SENTENCE_PIECE_NAME = "tokenizer.model"
ORIGIN_FILES = (
    CONFIGURATION_NAME,
    GENERATION_NAME,
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    _SENTENCE_PIECE_NAME,
)
LONGEST_CONTEXT = 1024
"""The longest context of a run whose founder does not say it. Models with rotary positions are made
for far longer sequences than ordinary computers can train."""
_NO_ADAPTERS = LoraSpec()
_COPY = "if it is the model's, copy it there in the place of the link"
_NOT_YET = "0" * 64
"""Stands in place of the weights' digest until they are written."""
_FILE_LIMIT_BYTES = 64 << 20
_SPEC = """\
# Goes on from {origin}.
#
# initial/ holds its weights: keep it beside this file until the run is founded. Newcomers fetch
# what they need from the peers.
name = "{name}"
total_steps = {total_steps}

{model}
[batch]
global_batch = {global_batch}
microbatch = {microbatch}

[optimizer]
peak_learning_rate = {learning_rate!r}
final_learning_rate = {final_learning_rate!r}
warmup_steps = {warmup_steps}

[data]
source = {data}

[evaluation]
sequences = {evaluation_sequences}
"""


@dataclass(frozen=True)
class Training:
    """How to train on. The file that `import` writes can be edited afterwards."""

    data: str
    total_steps: int
    global_batch: int
    microbatch: int
    learning_rate: float
    context: int = 0
    """Tokens in a sequence. 0: as many as the model is made for, but at most 1024 if its positions
    are rotary."""
    untie: bool = False
    """Whether a head that is the token embedding becomes a matrix of its own."""
    lora: LoraSpec = _NO_ADAPTERS
    """Adapters to train in place of the model."""


Progress = Callable[[int, int], None]
"""Bytes done, bytes in all."""


def import_hugging_face(
    directory: Path,
    out: Path,
    name: str,
    training: Training,
    progress: Progress = lambda done_bytes, total_bytes: None,
    tell: Callable[[str], None] = lambda text: None,
) -> RunSpec:
    """Make `out` with a run spec, the weights and, if there is one, the tokenizer.

    `tell` is told what is not as it was there. Returns the run spec. Raises `UserError` for a model
    that cannot be trained here or is damaged; `out` appears whole or not at all.
    """
    require_new(out)
    configuration = read_configuration(directory / CONFIGURATION_NAME)
    draft = _draft(configuration, directory, name, training, tell)
    tokenizer = _tokenizer(directory, draft)
    if tokenizer is None:
        tell(_of_no_tokenizer(directory))
    behind = [
        it for it in ORIGIN_FILES if (directory / it).is_file() and not lies_in(directory, it)
    ]
    for path in (directory / it for it in behind):
        tell(f"{path} is a link that leads out of that directory, so it stays behind; {_COPY}")
    _require_data(training.data, directory, tokenizer)
    if training.data == STANDARD_LIBRARY and not isinstance(tokenizer, ByteTokenizer | None):
        tell(
            f"{STANDARD_LIBRARY} is bytes, and the model has learnt with another tokenizer, so the "
            "run cannot be founded yet. Prepare text with it, and set data.source in "
            f"{out / RUN_SPEC_NAME} to what comes out: p2p-dtfm prepare TEXTS --out DATA "
            f"--tokenizer {out / TOKENIZER_NAME} --context {draft.model.context}"
        )
    with made_whole(out) as made:
        given = _Given(directory, configuration, draft)
        parameters = _told(draft, given.parameters, progress)
        origin = _travelling(directory, tokenizer, tell)
        initial = write_initial(made / INITIAL_NAME, draft, parameters, origin)
        text = _spec_text(draft, directory, training, initial.digest())
        if tokenizer is not None:
            (made / TOKENIZER_NAME).write_bytes(tokenizer.to_bytes())
        _copy_origin(directory, made / ORIGIN_NAME)
        if tokenizer is not None and behind and not _ends_alike(tokenizer, made / TOKENIZER_NAME):
            tell(
                "what says how its texts begin and end is among what stays behind: prepare texts "
                f"with --tokenizer {directory}, and not with {out / TOKENIZER_NAME}"
            )
        (made / RUN_SPEC_NAME).write_text(text, encoding="utf-8")
    return parse_run_spec(tomllib.loads(text), str(out / RUN_SPEC_NAME))


def _of_no_tokenizer(directory: Path) -> str:
    if (directory / _SENTENCE_PIECE_NAME).is_file():
        return (
            f"{directory / _SENTENCE_PIECE_NAME} is not read, and {TOKENIZER_NAME} is not there: "
            "only the weights come in. transformers makes one of the other: "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
        )
    return (
        f"there is no {TOKENIZER_NAME} in {directory}: only the weights come in, and whether the "
        "data are in the tokens that the model has learnt with cannot be checked"
    )


def _of_tied_head(training: Training) -> str:
    if training.untie:
        return (
            "its head is tied to the token embedding; here it starts as a copy of it, and is "
            "trained as a matrix of its own"
        )
    if training.lora.rank:
        return "its head is its token embedding, and frozen like that"
    return (
        "its head is its token embedding, and stays so: peers with either end give each other "
        "their sums in each step; --untie gives the head a matrix of its own"
    )


def _draft(
    configuration: Configuration,
    directory: Path,
    name: str,
    training: Training,
    tell: Callable[[str], None],
) -> RunSpec:
    """The run spec without the weights' digest. Raises `UserError` for what no run can have."""
    require_options(
        name,
        training.total_steps,
        training.global_batch,
        training.microbatch,
        training.learning_rate,
    )
    model = {**configuration.model, "context": _context(configuration, training, tell)}
    if "rope" in model and model["context"] != configuration.positions:
        model["rope"] = {**model["rope"], "positions": configuration.positions}
    if configuration.is_tied:
        model["tied_head"] = not training.untie
        tell(_of_tied_head(training))
    require_model(model, str(directory / CONFIGURATION_NAME))
    values = {
        "name": name or run_name(directory.resolve().name),
        "total_steps": training.total_steps,
        "model": model,
        "batch": {"global_batch": training.global_batch, "microbatch": training.microbatch},
        "optimizer": {"peak_learning_rate": training.learning_rate},
        "evaluation": {"sequences": _evaluation_sequences(training)},
    }
    if training.lora.rank:
        model["initial"] = _NOT_YET
        values["lora"] = training.lora.model_dump()
    return parse_run_spec(values, str(directory / CONFIGURATION_NAME))


def _context(configuration: Configuration, training: Training, tell: Callable[[str], None]) -> int:
    is_learned = configuration.family == "gpt2"
    if training.context and is_learned and training.context != configuration.positions:
        raise UserError(
            f"the model has learned {configuration.positions} positions, and --context asks for "
            f"{training.context}",
            f"leave out --context, or give {configuration.positions}",
        )
    if not is_learned and training.context > configuration.positions:
        raise UserError(
            f"--context: must be at most the {configuration.positions} positions that the model is "
            f"made for, not {training.context}",
            f"leave out --context, or give {configuration.positions} or less",
        )
    if training.context or is_learned:
        return training.context or configuration.positions
    if configuration.positions > LONGEST_CONTEXT:
        tell(
            f"sequences of {LONGEST_CONTEXT} tokens; the model is made for up to "
            f"{configuration.positions}: --context says otherwise"
        )
    return min(configuration.positions, LONGEST_CONTEXT)


def _tokenizer(directory: Path, spec: RunSpec) -> Tokenizer | None:
    """The model's tokenizer, if it has one. Raises `UserError` for one that does not fit."""
    path = directory / TOKENIZER_NAME
    if path.exists() and not path.is_file():
        raise UserError(
            f"cannot read {path}: it is no file",
            "put the tokenizer that belongs to the model there, or remove it",
        )
    if not path.exists():
        return None
    tokenizer = read_tokenizer_json(path)
    if tokenizer.vocabulary > spec.model.vocabulary:
        raise UserError(
            f"{path} has {counted(tokenizer.vocabulary, 'token')}, and the model knows "
            f"{spec.model.vocabulary}: it is the tokenizer of another model",
            "copy the tokenizer that belongs to the model, or remove the file and prepare the "
            "data with one that fits",
        )
    return tokenizer


def _require_data(source: str, directory: Path, own: Tokenizer | None) -> None:
    """Refuse data that are not there, or are not in the model's tokens. Raises `UserError`."""
    if source == STANDARD_LIBRARY:
        return  # known by name, and in bytes
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"no run spec can name the data {source}: that is no text in UTF-8",
            "rename that directory, or name a symbolic link to it",
        ) from error
    prepared = open_prepared(Path(source))
    if own is not None:
        require_tokenizer_of(directory / TOKENIZER_NAME, own, source, prepared.tokenizer)


class _Given:
    """The weights of a model's directory as parameters of ours. All but their values is checked."""

    def __init__(self, directory: Path, configuration: Configuration, spec: RunSpec) -> None:
        self._spec = spec
        self._tied_to = TOKEN_NAMES[configuration.family] if configuration.is_tied else HEAD_NAME
        self._weights = Weights(directory, PREFIXES[configuration.family])
        if configuration.is_tied and self._weights.holds_unlike(HEAD_NAME, self._tied_to):
            raise UserError(
                f"config.json in {directory} ties the head to the token embedding, and "
                f"{HEAD_NAME} is another matrix",
                (
                    "set tie_word_embeddings to false in config.json: the head is that matrix",
                    f"remove {HEAD_NAME} from the weights, if the embedding is the head",
                ),
            )
        layers = range(layer_count(spec))
        wanted = [part for layer in layers for parts in self._parts(layer) for part in parts]
        self._weights.check(wanted, {HEAD_NAME} if configuration.is_tied else ())

    def parameters(self, layer: int) -> Iterator[Tensor]:
        """A layer's parameters in canonical order, fp32."""
        for parts in self._parts(layer):
            tensors = [self._weights.tensor(part) for part in parts]
            yield tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _parts(self, layer: int) -> Iterator[list[Part]]:
        model = self._spec.model.model_copy(update={"tied_head": False})
        for name, shape in plain_entries(self._spec, layer):
            parts = parts_of(model, layer, name, shape)
            yield [
                part._replace(name=self._tied_to) if part.name == HEAD_NAME else part
                for part in parts
            ]


def _told(
    spec: RunSpec, parameters: Callable[[int], Iterable[Tensor]], progress: Progress
) -> Callable[[int], Iterator[Tensor]]:
    """`parameters` with `progress` called after each parameter."""
    shapes = [shape for n in range(layer_count(spec)) for _, shape in plain_entries(spec, n)]
    total_bytes = 4 * sum(map(math.prod, shapes))
    done_bytes = 0

    def of_layer(layer: int) -> Iterator[Tensor]:
        nonlocal done_bytes
        for tensor in parameters(layer):
            yield tensor
            done_bytes += 4 * tensor.numel()
            progress(done_bytes, total_bytes)

    return of_layer


def _travelling(
    directory: Path, tokenizer: Tokenizer | None, tell: Callable[[str], None]
) -> bytes | None:
    """The file that goes to all members with the weights. A model without a tokenizer has none:
    what its files say of tokens does not hold for the tokens that the run is trained with."""
    origin = None if tokenizer is None else pack(directory, tokenizer)
    if tokenizer is not None and origin is None:
        tell(
            f"the model's own files in {ORIGIN_NAME}/ come to more than "
            f"{bytes_text(ORIGIN_LIMIT_BYTES)} and stay here: other members export without its "
            "special tokens and chat template"
        )
    return origin


def _ends_alike(own: Tokenizer, made: Path) -> bool:
    """Whether texts begin and end as the model's do, where they are prepared with what was made."""
    read = read_tokenizer_json(made)
    ends = [(it.start_of_document, it.end_of_document) for it in (own, read)]
    return ends[0] == ends[1]


def _copy_origin(directory: Path, to: Path) -> None:
    to.mkdir()
    for name in ORIGIN_FILES:
        path = directory / name
        if lies_in(directory, name) and path.stat().st_size <= _FILE_LIMIT_BYTES:
            shutil.copyfile(path, to / name)


def _spec_text(spec: RunSpec, directory: Path, training: Training, initial: str) -> str:
    origin = directory.resolve().name.encode("ascii", "replace").decode()
    model = spec.model.stated() | {"initial": initial}
    return _SPEC.format(
        origin="".join(sign if sign.isprintable() else " " for sign in origin),
        name=spec.name,
        total_steps=training.total_steps,
        model=_toml("model", model) + _lora_text(training.lora),
        global_batch=training.global_batch,
        microbatch=training.microbatch,
        learning_rate=training.learning_rate,
        final_learning_rate=training.learning_rate / 10,
        warmup_steps=min(100, training.total_steps // 10),
        data=json.dumps(training.data, ensure_ascii=False).replace("\x7f", "\\u007f"),
        evaluation_sequences=_evaluation_sequences(training),
    )


def _lora_text(lora: LoraSpec) -> str:
    if not lora.rank:
        return ""
    targets = json.dumps(lora.targets)
    return f"\n[lora]\nrank = {lora.rank}\nalpha = {lora.alpha!r}\ntargets = {targets}\n"


def _toml(name: str, values: Mapping[str, Any]) -> str:
    """A table of numbers, texts and truth values, and of tables, as TOML."""
    lines = [f"[{name}]"]
    lines += [
        f"{key} = {json.dumps(value) if isinstance(value, str | bool) else repr(value)}"
        for key, value in values.items()
        if not isinstance(value, dict)
    ]
    inner = [
        _toml(f"{name}.{key}", value) for key, value in values.items() if isinstance(value, dict)
    ]
    return "\n".join([*lines, "", *inner])


def _evaluation_sequences(training: Training) -> int:
    return -(-32 // training.microbatch) * training.microbatch


def run_name(text: str) -> str:
    """Text made into what a run may be called."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "imported"

"""Commands that bring models out and in: export, import."""

import contextlib
import math
import shlex
import tempfile
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2p_dtfm.cli.app import HomeOption, app
from p2p_dtfm.cli.commands.data import tokenizer_of
from p2p_dtfm.cli.commands.offline.newest_model import newest_checkpoint
from p2p_dtfm.cli.terminal.progress import progress_of_bytes
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted

if TYPE_CHECKING:
    from p2p_dtfm.core.protocol.sections.lora_spec import LoraSpec
    from p2p_dtfm.train.data import Tokenizer
    from p2p_dtfm.train.hugging_face.model_card import KnownOfModel


class ExportFormat(StrEnum):
    HF = "hf"
    SAFETENSORS = "safetensors"
    GGUF = "gguf"


DEFAULT_TARGETS = "query,value"
KEPT = 3
_WITHOUT_ORIGIN = (
    "without the special tokens, chat template and generation settings of the model that the run "
    "began from, since {why}"
)
_TAKES_ALONG = (
    "--tokenizer-of DIR takes them along, from the directory that import made on the founder's "
    "machine"
)


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="A new directory (hf) or file (safetensors, gguf).")],
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A checkpoint directory, or one that import made; default: the newest whole "
            "checkpoint of this home."
        ),
    ] = None,
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="For transformers (hf), llama.cpp (gguf), or one file under our own names.",
        ),
    ] = ExportFormat.HF,
    imported: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer-of",
            help="A directory that import made: the tokenizer's files and special tokens of the "
            "model that the run began with go along; needed where these did not come with the run.",
        ),
    ] = None,
    merged: Annotated[
        bool,
        typer.Option(
            "--merged",
            help="Of a run that trains adapters, the whole model with them added; else hf is the "
            "adapters alone, for the library peft. Other forms are always whole.",
        ),
    ] = False,
    every: Annotated[
        int,
        typer.Option(
            min=0,
            help="While the run trains, into --out every so many steps, as checkpoints of this "
            "home become whole; ends with the run. 0: once.",
        ),
    ] = 0,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help=f"With --every: so many of the newest stay; default: {KEPT}."),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Write the trained model for use elsewhere."""
    if imported is not None and form is ExportFormat.SAFETENSORS:
        raise UserError(
            "--format safetensors holds parameters alone: --tokenizer-of does not go with it",
            "leave it out, or choose hf or gguf",
        )
    if not every:
        if keep is not None:
            raise UserError("--keep goes with --every", "add --every STEPS, or leave it out")
        return _export_once(out, checkpoint, form, imported, merged, home)
    import threading

    from p2p_dtfm.cli.commands.offline.repeated_export import RepeatedExport

    if checkpoint is not None:
        raise UserError(
            "--every follows the checkpoints of a home, and one checkpoint was named",
            "leave out one of the two",
        )

    _require_possible(out, form, imported)

    def write(directory: Path, target: Path) -> None:
        _export_once(target, directory, form, imported, merged, home)

    suffix = "" if form is ExportFormat.HF else f".{form.value}"
    newest, kept = partial(newest_checkpoint, home), KEPT if keep is None else keep
    repeated = RepeatedExport(newest, write, out, every, kept, suffix, partial(_runs_in, home))
    repeated.follow(lambda text: typer.echo(text, err=True), threading.Event().wait)


def _runs_in(home: Path | None) -> str:
    """What is missing if no daemon runs in that home; empty if one does."""
    from p2p_dtfm.daemon.machine.home import Home, default_home, home_option
    from p2p_dtfm.daemon.machine.local_client import holder_of

    place = Home(home or default_home())
    if holder_of(place) is not None:
        return ""
    return (
        f"no daemon runs in {place.root}: nothing new comes until one is started, "
        f"p2p-dtfm{home_option(place.root)}"
    )


def _require_possible(out: Path, form: ExportFormat, imported: Path | None) -> None:
    """Refuse what no later checkpoint can mend. Raises `UserError`."""
    from p2p_dtfm.train.hugging_face.export import require_imported
    from p2p_dtfm.train.hugging_face.gguf_export import require_library

    if imported is not None:
        require_imported(imported)
    if form is ExportFormat.GGUF:
        require_library()
    if out.exists() and not out.is_dir():
        raise UserError(
            f"{out} is a file, and --every writes several into a directory",
            "name a directory with --out",
        )


def _export_once(
    out: Path,
    checkpoint: Path | None,
    form: ExportFormat,
    imported: Path | None,
    merged: bool,
    home: Path | None,
) -> None:
    from p2p_dtfm.train.hugging_face.export import (
        export_hugging_face,
        export_safetensors,
        is_imported,
        model_in,
    )
    from p2p_dtfm.train.hugging_face.families import CLASSES, family_of
    from p2p_dtfm.train.hugging_face.gguf_export import export_gguf
    from p2p_dtfm.train.model.generate import whole_checkpoint

    directory = checkpoint or newest_checkpoint(home)
    comes_from_import = is_imported(directory)
    if not comes_from_import:
        directory = whole_checkpoint(directory)
    model = model_in(directory)
    is_adapter = model.spec.trains_adapters and not comes_from_import and not merged
    if is_adapter and form is ExportFormat.HF:
        return _export_adapter(directory, out)
    tokenizer = None if comes_from_import else _tokenizer_for(form, directory)
    with tempfile.TemporaryDirectory() as scratch, progress_of_bytes() as tell:
        origin = None
        if form is not ExportFormat.SAFETENSORS:
            origin = _origin_for(directory, imported, tokenizer, Path(scratch))

        def progress(done_bytes: int, total_bytes: int) -> None:
            tell(done_bytes, total_bytes, "writing")

        if form is ExportFormat.HF:
            told = told_of(directory)
            export_hugging_face(directory, out, tokenizer, progress, origin, told)
        elif form is ExportFormat.GGUF:
            export_gguf(directory, out, tokenizer, progress, origin)
        else:
            export_safetensors(directory, out, progress)
    typer.echo(f"the model of {model.spec.name} after step {model.step} is in {out}")
    if form is ExportFormat.HF:
        family = CLASSES[family_of(model.spec.model)]
        typer.echo(f"load it with: transformers.{family}.from_pretrained({str(out)!r})")
    elif form is ExportFormat.GGUF:
        typer.echo(f"try it with: llama-cli -m {shlex.quote(str(out))}")


def _origin_for(
    directory: Path, imported: Path | None, tokenizer: "Tokenizer | None", scratch: Path
) -> Path | None:
    """The own files of the model that the checkpoint's run began from: those that the user named,
    or those that travelled with the run. If they are not there, this is told. None also for a
    directory that `import` made: it has its own."""
    from p2p_dtfm.core.protocol.errors import PeerFault
    from p2p_dtfm.train.data import blobs_in
    from p2p_dtfm.train.hugging_face.export import is_imported, origin_of
    from p2p_dtfm.train.hugging_face.origin_files import travelled, unpack
    from p2p_dtfm.train.model.checkpoint import read_manifest, run_directory_of

    if imported is not None:
        origin = origin_of(imported)
        _require_same_tokens(origin, tokenizer)
        return origin
    if is_imported(directory):
        return None
    spec = read_manifest(directory).spec()
    if not spec.model.initial:
        return None
    blobs = blobs_in(run_directory_of(directory))
    why = f"they did not come to this machine with the run; {_TAKES_ALONG}"
    try:
        payload = travelled(blobs, spec) if blobs is not None else None
        if payload is not None and tokenizer is not None:
            if unpack(payload, tokenizer, scratch):
                return scratch
            why = "the run is trained with another tokenizer"
    except PeerFault as fault:
        why = f"they cannot be used ({fault.cause}); {_TAKES_ALONG}"
    typer.echo(f"note: {_WITHOUT_ORIGIN.format(why=why)}", err=True)
    return None


def _require_same_tokens(origin: Path, tokenizer: "Tokenizer | None") -> None:
    """Raises `UserError` where a model's own files speak of other tokens than its checkpoint."""
    from p2p_dtfm.train.data.prepare import TOKENIZER_NAME
    from p2p_dtfm.train.hugging_face.tokenizer_json import read_tokenizer_json

    if tokenizer is None or not (origin / TOKENIZER_NAME).is_file():
        return
    if read_tokenizer_json(origin).to_bytes() != tokenizer.to_bytes():
        raise UserError(
            f"{origin.parent} has another tokenizer than the run is trained with",
            "leave out --tokenizer-of: its tokens would mean other text",
        )


def _tokenizer_for(form: ExportFormat, directory: Path) -> "Tokenizer | None":
    """The tokenizer of a checkpoint's run. None if it is not wanted or, which is told, not
    there."""
    if form is ExportFormat.SAFETENSORS:
        return None
    try:
        return tokenizer_of(directory)
    except UserError as error:
        typer.echo(f"without a tokenizer: {error.cause}", err=True)
        return None


def _export_adapter(directory: Path, out: Path) -> None:
    from p2p_dtfm.train.hugging_face.peft_adapter import export_adapter

    spec, step = export_adapter(directory, out, told_of(directory))
    typer.echo(f"the adapters of {spec.name} after step {step} are in {out}")
    typer.echo(
        f"load them over the model that the run began from: "
        f"peft.PeftModel.from_pretrained(model, {str(out)!r}); --merged writes both as one model"
    )


def told_of(directory: Path) -> "KnownOfModel":
    """What the home of a checkpoint knows of the run, as far as its files are there."""
    from p2p_dtfm.core.protocol.errors import PeerFault
    from p2p_dtfm.train.data import blobs_in, load_manifest
    from p2p_dtfm.train.hugging_face.model_card import KnownOfModel
    from p2p_dtfm.train.model.checkpoint import read_manifest, run_directory_of

    if not (directory / "manifest.json").is_file():
        return KnownOfModel()  # imported, and not trained here
    manifest = read_manifest(directory)
    run = run_directory_of(directory)
    notes = None
    if (blobs := blobs_in(run)) is not None:
        path = blobs.path(manifest.spec().data.manifest)
        with contextlib.suppress(UserError, PeerFault):
            notes = load_manifest(path).notes if path is not None else None
    steps, members = _history(run, manifest.step)
    return KnownOfModel(
        tokens=manifest.committed_tokens,
        notes=notes,
        members=sorted(members),
        losses=_curve(steps, "loss"),
        held_out=_curve(steps, "held_out_loss"),
    )


def _history(run: Path, until: int) -> tuple[dict[int, dict[str, Any]], set[str]]:
    """The committed steps, of each the last entry, and all peers that were in any view. What a
    damaged line says is left out."""
    from p2p_dtfm.daemon.telemetry.event_log import read_events

    steps: dict[int, dict[str, Any]] = {}
    members: set[str] = set()
    for event in read_events(run):
        step, there = event.get("step"), event.get("members")
        if event.get("event") == "step" and type(step) is int and step <= until:
            steps[step] = event
        if event.get("event") == "view" and isinstance(there, list):
            members |= {member for member in there if isinstance(member, str)}
    return steps, members


def _curve(steps: dict[int, dict[str, Any]], name: str) -> list[tuple[int, float]]:
    values = [(step, event.get(name)) for step, event in sorted(steps.items())]
    return [(step, it) for step, it in values if isinstance(it, float) and math.isfinite(it)]


@app.command(name="import")
def import_model(
    directory: Annotated[
        Path, typer.Argument(help="A GPT-2, Llama or Qwen3 in Hugging Face's format.")
    ],
    out: Annotated[Path, typer.Option(help="New directory for the run spec and the weights.")],
    data: Annotated[
        str, typer.Option(help="Directory that p2p-dtfm prepare made, with the text to learn.")
    ] = "python-standard-library",
    name: Annotated[str, typer.Option(help="What the run is called.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 1000,
    global_batch: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 32,
    microbatch: Annotated[int, typer.Option(min=1, help="Sequences computed at once.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-4,
    context: Annotated[
        int | None,
        typer.Option(min=8, help="Tokens in a sequence, of a model with rotary positions."),
    ] = None,
    untie: Annotated[
        bool,
        typer.Option(
            "--untie",
            help="Give a head that is the token embedding a matrix of its own: another "
            "model, whose ends exchange nothing.",
        ),
    ] = False,
    lora_rank: Annotated[
        int,
        typer.Option(
            min=0, max=1024, help="Freeze the model, and train adapters of this rank (LoRA)."
        ),
    ] = 0,
    lora_alpha: Annotated[
        float | None, typer.Option(help="Adapters count alpha / rank; default: twice the rank.")
    ] = None,
    lora_targets: Annotated[
        str,
        typer.Option(
            help="Which matrices get adapters: query, key, value, output, gate, up, down, "
            "separated by commas."
        ),
    ] = DEFAULT_TARGETS,
) -> None:
    """Start a run from a model that is there already: fine-tuning."""
    from p2p_dtfm.train.hugging_face.model_import import (
        RUN_SPEC_NAME,
        Training,
        import_hugging_face,
    )

    training = Training(
        _source(data),
        steps,
        global_batch,
        microbatch,
        learning_rate,
        context or 0,
        untie,
        _lora(lora_rank, lora_alpha, lora_targets),
    )
    notes: list[str] = []
    with progress_of_bytes() as tell:

        def progress(done_bytes: int, total_bytes: int) -> None:
            tell(done_bytes, total_bytes, "importing")

        spec = import_hugging_face(directory, out, name, training, progress, notes.append)
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(
        f"{counted(spec.model.layers, 'block')} of width {spec.model.width}, vocabulary "
        f"{spec.model.vocabulary}, context {spec.model.context}"
    )
    typer.echo(f"found the run with: p2p-dtfm --run {shlex.quote(str(out / RUN_SPEC_NAME))}")


def _source(data: str) -> str:
    """What the run spec names as data, wherever it lies. No shell reads the `~` in `--data=~/text`.
    Raises `UserError`."""
    from p2p_dtfm.daemon.machine.home import expanded

    if not data:
        raise UserError(
            "--data stands without a value: '' follows it",
            "write the directory that p2p-dtfm prepare made, or leave it out",
        )
    return data if data == "python-standard-library" else str(expanded(Path(data)).absolute())


def _lora(rank: int, alpha: float | None, targets: str) -> "LoraSpec":
    """Raises `UserError`."""
    from pydantic import ValidationError

    from p2p_dtfm.core.protocol.sections.lora_spec import LoraSpec

    if not rank:
        if alpha is not None or targets != DEFAULT_TARGETS:
            raise UserError(
                "--lora-alpha and --lora-targets say what adapters are like, and there are none",
                "give their rank, such as --lora-rank 8, or leave the two out",
            )
        return LoraSpec()
    named = [target.strip() for target in targets.split(",")]
    values = {"rank": rank, "alpha": 2.0 * rank if alpha is None else alpha, "targets": named}
    try:
        return LoraSpec.model_validate(values)
    except ValidationError as error:
        raise UserError(
            f"adapters cannot be made so: --lora-targets {targets}, --lora-alpha {alpha}",
            (
                "name some of query, key, value, output, gate, up, down, each once",
                "choose an alpha above 0, such as twice the rank",
            ),
        ) from error

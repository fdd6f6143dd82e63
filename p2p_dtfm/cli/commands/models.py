"""Commands that bring models out and in: export, import."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from p2p_dtfm.cli.app import HomeOption, app
from p2p_dtfm.cli.commands.data import newest_checkpoint, tokenizer_of
from p2p_dtfm.cli.terminal.progress import progress_of_bytes
from p2p_dtfm.core.protocol.errors import UserError


class ExportFormat(StrEnum):
    HF = "hf"
    SAFETENSORS = "safetensors"


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="A new directory (hf) or file (safetensors).")],
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="A checkpoint directory; default: the newest whole one of this home."),
    ] = None,
    form: Annotated[
        ExportFormat, typer.Option("--format", help="For transformers, or one file of tensors.")
    ] = ExportFormat.HF,
    home: HomeOption = None,
) -> None:
    """Write the trained model for use elsewhere."""
    from p2p_dtfm.train.hugging_face.export import export_hugging_face, export_safetensors
    from p2p_dtfm.train.model.checkpoint import read_manifest
    from p2p_dtfm.train.model.generate import whole_checkpoint

    directory = whole_checkpoint(checkpoint or newest_checkpoint(home))
    manifest = read_manifest(directory)
    tokenizer = None
    if form is ExportFormat.HF:
        try:
            tokenizer = tokenizer_of(directory)
        except UserError as error:
            typer.echo(f"without a tokenizer: {error.cause}", err=True)
    with progress_of_bytes() as tell:

        def progress(done_bytes: int, total_bytes: int) -> None:
            tell(done_bytes, total_bytes, "writing")

        if form is ExportFormat.HF:
            export_hugging_face(directory, out, tokenizer, progress)
        else:
            export_safetensors(directory, out, progress)
    typer.echo(f"the model of {manifest.spec().name} after step {manifest.step} is in {out}")
    if form is ExportFormat.HF:
        typer.echo(f"load it with: transformers.GPT2LMHeadModel.from_pretrained({str(out)!r})")


@app.command(name="import")
def import_model(
    directory: Annotated[Path, typer.Argument(help="A GPT-2 in Hugging Face's format.")],
    out: Annotated[Path, typer.Option(help="New directory for the run spec and the weights.")],
    data: Annotated[
        str, typer.Option(help="Directory that p2p-dtfm prepare made, with the text to learn.")
    ] = "python-standard-library",
    name: Annotated[str, typer.Option(help="What the run is called.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 1000,
    global_batch: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 32,
    microbatch: Annotated[int, typer.Option(min=1, help="Sequences computed at once.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-4,
) -> None:
    """Start a run from a model that is there already: fine-tuning."""
    from p2p_dtfm.train.hugging_face.gpt2_import import RUN_SPEC_NAME, Training, import_hugging_face

    source = data if data == "python-standard-library" else str(Path(data).absolute())
    training = Training(source, steps, global_batch, microbatch, learning_rate)
    with progress_of_bytes() as tell:
        spec = import_hugging_face(
            directory, out, name, training, lambda done, total: tell(done, total, "importing")
        )
    typer.echo(
        f"{spec.model.layers} blocks of width {spec.model.width}, vocabulary "
        f"{spec.model.vocabulary}, context {spec.model.context}"
    )
    typer.echo(f"found the run with: p2p-dtfm --run {out / RUN_SPEC_NAME}")

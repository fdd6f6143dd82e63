"""Commands about data and models on disk: prepare, generate."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from p2p_dtfm.cli.app import HomeOption, app
from p2p_dtfm.cli.commands.offline.conversations import prepare_conversations
from p2p_dtfm.cli.commands.offline.newest_model import newest_checkpoint, told_of_model
from p2p_dtfm.cli.terminal.plain import harmless_lines
from p2p_dtfm.cli.terminal.progress import progress_of_bytes
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted

if TYPE_CHECKING:
    from p2p_dtfm.train.data import Tokenizer
    from p2p_dtfm.train.model.generate import Loaded

Duplicates = Literal["keep", "exact", "near"]
HELD_OUT = 0.02
SIMILARITY = 0.8


@app.command()
def prepare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Files and directories: text, JSON lines (.jsonl), Parquet, or a data set that "
            "Hugging Face's datasets saved to disk."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="New or empty directory for shards, tokenizer and manifest.")
    ],
    vocabulary: Annotated[
        int | None, typer.Option(help="Learn a byte-pair encoding of this size; default: bytes.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Use this tokenizer.json, as import writes it for a model, or that of a model's "
            "directory; the token that ends the model's texts ends documents."
        ),
    ] = None,
    field: Annotated[
        str, typer.Option(help="Which field of a row holds its text, where files have rows.")
    ] = "text",
    held_out: Annotated[
        float | None,
        typer.Option(help=f"Fraction of the text kept for evaluation; default: {HELD_OUT}."),
    ] = None,
    validation: Annotated[
        list[Path] | None,
        typer.Option(help="Keep these files for evaluation instead; may be repeated."),
    ] = None,
    held_out_by_document: Annotated[
        bool,
        typer.Option("--held-out-by-document", help="Never hold out a part of a text file only."),
    ] = False,
    keep: Annotated[
        str,
        typer.Option(
            help="Take documents of which this holds, such as 'rps_doc_word_count >= 50 and "
            "rps_doc_mean_word_length < 10': quality signals as in RedPajama-V2."
        ),
    ] = "",
    deduplicate: Annotated[
        Duplicates,
        typer.Option(help="Take equal texts once (exact), or also texts that are alike (near)."),
    ] = "keep",
    similarity: Annotated[
        float | None,
        typer.Option(
            help="With near: from which on texts count as alike, by their shared runs of five "
            f"words; default: {SIMILARITY}."
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens in a sequence of the run.")] = 128,
    name: Annotated[str, typer.Option(help="What these data are called.")] = "",
    licence: Annotated[str, typer.Option(help="Under which licence they are.")] = "",
    source: Annotated[str, typer.Option(help="Where they come from.")] = "",
    conversations: Annotated[
        bool,
        typer.Option(
            "--conversations",
            help='The files are JSON lines of conversations ("messages", or "prompt" and '
            '"completion"), and only answers count.',
        ),
    ] = False,
    chat: Annotated[
        Path | None,
        typer.Option(
            help="Write conversations as the model of this directory does: its chat template, "
            "control tokens and tokenizer. A directory of Hugging Face's, or the origin/ of one "
            "that was imported."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the prepared data that --out holds.")
    ] = False,
) -> None:
    """Make token shards from text of your own."""
    from p2p_dtfm.train.data import Skipped, Wish, stated_licence
    from p2p_dtfm.train.data import prepare as make
    from p2p_dtfm.train.data.prepare import MANIFEST_NAME
    from p2p_dtfm.train.hugging_face.tokenizer_json import read_tokenizer_json

    if tokenizer is not None and vocabulary is not None:
        raise UserError("--tokenizer and --vocabulary exclude each other", "give one of the two")
    if (out / MANIFEST_NAME).exists() and not overwrite:
        raise UserError(
            f"{out} holds prepared data already, which runs may still need",
            ("choose a new directory for --out", "replace them: the same line with --overwrite"),
        )
    if conversations or chat is not None:
        asked = {
            "--keep": keep,
            "--deduplicate": deduplicate != "keep",
            "--validation": validation,
            "--held-out-by-document": held_out_by_document,
            "--field": field != "text",
            "--vocabulary": vocabulary,
            "--similarity": similarity is not None,
        }
        if unused := [option for option, value in asked.items() if value]:
            raise UserError(
                f"conversations are prepared without {', '.join(unused)}",
                "leave out what is of plain text, or --conversations and --chat",
            )
        notes = (name, licence, source)
        part = HELD_OUT if held_out is None else held_out
        return prepare_conversations(paths, out, tokenizer, chat, part, context, notes)
    _refuse_what_changes_nothing(
        validation, held_out, held_out_by_document, deduplicate, similarity
    )
    given = None if tokenizer is None else read_tokenizer_json(tokenizer)
    skipped = Skipped()
    with progress_of_bytes() as progress:
        manifest = make(
            paths,
            out,
            vocabulary=vocabulary,
            held_out_fraction=HELD_OUT if held_out is None else held_out,
            context=context,
            name=name,
            licence=licence or stated_licence(paths),
            source=source,
            progress=progress,
            skipped=skipped,
            tokenizer=given,
            text_field=field,
            validation=validation,
            wish=Wish(keep, deduplicate, SIMILARITY if similarity is None else similarity),
            held_out_by_document=held_out_by_document,
            say=lambda text: typer.echo(f"note: {text}", err=True),
        )
    train, test = manifest.totals.train_tokens, manifest.totals.held_out_tokens
    typer.echo(f"{train:,} training and {test:,} held-out tokens in {out}")
    if test > train:
        typer.echo(
            f"warning: more is held out ({counted(test, 'token')}) than is left to train on "
            f"({train:,}): name other files with --validation, or a smaller --held-out",
            err=True,
        )
    typer.echo(f"vocabulary {manifest.vocabulary}, manifest {manifest.digest()[:16]}")
    typer.echo(f"skipped: {skipped}")
    typer.echo(f"those who join are shown: {manifest.describe()}")
    typer.echo(f'use them in a run spec: [data] source = "{out.absolute()}"')


def _refuse_what_changes_nothing(
    validation: list[Path] | None,
    held_out: float | None,
    held_out_by_document: bool,
    deduplicate: Duplicates,
    similarity: float | None,
) -> None:
    """Raises `UserError`."""
    if similarity is not None and deduplicate != "near":
        raise UserError(
            "--similarity goes with --deduplicate near",
            "add that, or leave it out: equal texts are equal",
        )
    parts = {"--held-out": held_out is not None, "--held-out-by-document": held_out_by_document}
    for option in (name for name, is_given in parts.items() if is_given and validation):
        raise UserError(
            f"--validation names what is held out: {option} does not go with it",
            "leave out one of the two",
        )


@app.command()
def generate(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A checkpoint directory, or one that import made; default: the newest whole "
            "checkpoint of this home."
        ),
    ] = None,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "def ",
    tokens: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="How many to write at most.")
    ] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.8,
    seed: Annotated[
        int, typer.Option(min=0, max=(1 << 63) - 1, help="The same seed gives the same text.")
    ] = 0,
    home: HomeOption = None,
) -> None:
    """Write text with a trained model, until the text ends."""
    from p2p_dtfm.train.model.generate import spare_processors, stream_until

    loaded, tokenizer = _model_of(checkpoint or newest_checkpoint(home))
    spare_processors(loaded[0])
    shown = harmless_lines if sys.stdout.isatty() else str
    sys.stdout.write(shown(prompt))
    end = tokenizer.end_of_document
    for piece in stream_until(end, loaded, tokenizer, prompt, tokens, temperature, seed):
        sys.stdout.write(shown(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")


def _model_of(directory: Path) -> "tuple[Loaded, Tokenizer]":
    """The model and tokenizer of a checkpoint, or of what `import` wrote. Raises `UserError`."""
    from p2p_dtfm.train.data.prepare import TOKENIZER_NAME
    from p2p_dtfm.train.hugging_face.export import is_imported, model_in
    from p2p_dtfm.train.hugging_face.tokenizer_json import read_tokenizer_json
    from p2p_dtfm.train.model.generate import load_model, whole_checkpoint
    from p2p_dtfm.train.model.gpt import layer_count

    if not is_imported(directory):
        directory = whole_checkpoint(directory)
        typer.echo(told_of_model(directory), err=True)
        return load_model(directory), tokenizer_of(directory)
    model = model_in(directory)
    tokenizer = read_tokenizer_json(directory / TOKENIZER_NAME)
    return (model.spec, [model.layer(n) for n in range(layer_count(model.spec))]), tokenizer


def tokenizer_of(directory: Path) -> "Tokenizer":
    """The tokenizer of a checkpoint's run, which lies beside it. Raises `UserError`."""
    from p2p_dtfm.train.data import BLOBS_NAME, as_stated, blobs_in, load_manifest, load_tokenizer
    from p2p_dtfm.train.model.checkpoint import (
        list_checkpoints,
        read_manifest,
        run_directory_of,
    )

    if not (directory / "manifest.json").is_file() and (found := list_checkpoints(directory)):
        directory = found[0].directory
    manifest = read_manifest(directory)
    run = run_directory_of(directory)
    store, blobs = blobs_in(run), run / BLOBS_NAME
    path = store.path(manifest.spec().data.manifest) if store else None
    if store is None or path is None:
        raise UserError(
            f"the tokenizer of {directory} is missing: it is looked for in {blobs}",
            "keep checkpoints in the run's directory of the daemon's home",
        )
    entry = load_manifest(path).tokenizer
    tokenizer = store.path(entry.digest)
    if tokenizer is None:
        raise UserError(f"the tokenizer is missing in {blobs}", "join the run again to fetch it")
    return as_stated(load_tokenizer(tokenizer), entry)

"""What `p2p-dtfm prepare --conversations` does."""

from pathlib import Path

import typer

from p2p_dtfm.cli.terminal.progress import progress_of_bytes


def prepare_conversations(
    paths: list[Path],
    out: Path,
    tokenizer: Path | None,
    chat: Path | None,
    held_out: float,
    context: int,
    notes: tuple[str, str, str],
) -> None:
    """Raises `UserError`."""
    from p2p_dtfm.train.data.chat.conversations import conversation_files
    from p2p_dtfm.train.data.chat.prepare_chat import prepare_chat
    from p2p_dtfm.train.data.chat.template import TOKENIZER_NAME, ChatForm, read_chat_form
    from p2p_dtfm.train.data.prepare import notes_of
    from p2p_dtfm.train.data.tokenizer import ByteTokenizer
    from p2p_dtfm.train.hugging_face.tokenizer_json import (
        control_tokens_file,
        read_tokenizer_json,
        require_control_tokens_of,
    )

    files = conversation_files(paths, out)
    named_in = None if tokenizer is None else control_tokens_file(tokenizer)
    form = ChatForm() if chat is None else read_chat_form(chat, named_in)
    if tokenizer is None and chat is not None:
        tokenizer = chat / TOKENIZER_NAME
    made = ByteTokenizer() if tokenizer is None else read_tokenizer_json(tokenizer)
    if chat is not None and tokenizer is not None:
        require_control_tokens_of(tokenizer, chat, form.special)
    with progress_of_bytes() as progress:
        manifest, totals = prepare_chat(
            files,
            out,
            made,
            form,
            context=context,
            held_out_fraction=held_out,
            notes=notes_of(*notes),
            progress=progress,
        )
    sequences = sum(len(shard.counted) for shard in manifest.shards)
    typer.echo(
        f"{totals.conversations:,} conversations in {sequences:,} sequences of {context} tokens, "
        f"of which {totals.counted_tokens:,} count, in {out}"
    )
    if totals.taken_apart:
        typer.echo(
            f"{totals.taken_apart:,} of them are written once for each of their answers: the chat "
            "template writes the last one otherwise than those before"
        )
    typer.echo(f"vocabulary {manifest.vocabulary}, manifest {manifest.digest()[:16]}")
    typer.echo(f"left out: {totals.left_out}")
    typer.echo(f"those who join are shown: {manifest.notes.describe()}")
    typer.echo(f'use them in a run spec: context = {context}, [data] source = "{out.absolute()}"')

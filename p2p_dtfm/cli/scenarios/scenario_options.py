"""Options that `plan` and `simulate` have in common: which run, and how large."""

from typing import Annotated

import typer

LayersOption = Annotated[int | None, typer.Option(help="Blocks, instead of the run spec's.")]
GlobalBatchOption = Annotated[
    int | None, typer.Option(help="Sequences in a step, instead of the run spec's.")
]

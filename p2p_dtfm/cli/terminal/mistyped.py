"""What was probably meant by a word that is no command, in lines that can be typed."""

import difflib
from collections.abc import Iterable
from typing import Any

from typer.core import TyperGroup

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.invited.line import PREFIX

AGAIN = "p2p-dtfm alone, which takes up the last run"
MEANT = {
    "join": ("p2p-dtfm --initial-peers ADDRESS", "p2p-dtfm --invite LINE"),
    "found": ("p2p-dtfm --run FILE",),
    "start": (AGAIN, "p2p-dtfm --initial-peers ADDRESS", "p2p-dtfm --run FILE"),
    "run": (AGAIN, "p2p-dtfm --initial-peers ADDRESS", "p2p-dtfm --run FILE"),
    "stop": ("p2p-dtfm leave", "p2p-dtfm pause --for 2h"),
    "install": ("p2p-dtfm service install",),
    "uninstall": ("p2p-dtfm service uninstall",),
    "help": ("p2p-dtfm --help",),
    "version": ("p2p-dtfm --version",),
}
"""Words for which other programs have a command, and what does it here."""
MEANT |= {"quit": MEANT["stop"], "exit": MEANT["stop"], "create": MEANT["found"]}


class Commands(TyperGroup):
    """All commands. A word that is none of them is answered like any other mistake."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        is_known = ctx.resilient_parsing or self.get_command(ctx, word) is not None
        if not is_known and not word.startswith("-"):
            known = [name for name, command in self.commands.items() if not command.hidden]
            raise UserError(f"there is no command {shortened(word)!r}", lines_for(word, known))
        return super().resolve_command(ctx, args)


def lines_for(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """What to type in place of `p2p-dtfm WORD`; `known`: the commands that there are."""
    if word.startswith("/"):
        return (f"an address stands behind its option: p2p-dtfm --initial-peers {word}",)
    if word.startswith(PREFIX):
        return (f"an invitation stands behind its option: p2p-dtfm --invite {word}",)
    if word.endswith(".toml"):
        return (f"a run spec stands behind its option: p2p-dtfm --run {word}",)
    lower = word.lower()
    if lower in MEANT:
        return tuple(f"type {line}" for line in MEANT[lower])
    words = [*known, *MEANT]
    near = difflib.get_close_matches(lower, words, n=1, cutoff=0.75)
    near = near or difflib.get_close_matches(lower, words, n=3)
    lines = dict.fromkeys(line for name in near for line in MEANT.get(name, (f"p2p-dtfm {name}",)))
    return tuple(f"did you mean {line}?" for line in lines) or (
        "p2p-dtfm --help lists all commands",
    )


def shortened(word: str) -> str:
    return word if len(word) <= 60 else f"{word[:57]}..."

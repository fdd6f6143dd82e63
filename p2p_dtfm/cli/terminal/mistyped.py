"""What the user probably meant by a line that cannot be run, in lines that can be typed."""

import difflib
import errno
import inspect
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.invited.line import PREFIX
from p2p_dtfm.core.protocol.plain_words import in_plain_words
from p2p_dtfm.daemon.machine.locks import temporary_folder

_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
"""Some versions of typer take this class from click, others have their own."""

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
"""Words that are commands of other programs, and what does the same here."""
MEANT |= {"quit": MEANT["stop"], "exit": MEANT["stop"], "create": MEANT["found"]}

MAY_USE_IT = "see what it is, and that this user may use it: ls -ld on it and above"
NAMING = ("--run", "--invite", "--initial-peers", "--run-digest")
"""Options that say which run or swarm is meant. An empty value, of a variable that is not set,
would count as none: another run would be taken up, joined or played."""


class Commands(TyperGroup):
    """All commands. An unknown word, an unknown option or a value that an option cannot have is
    answered like any other mistake."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _told_as_others():
            context = super().make_context(*arguments, **more)
        refuse_what_is_no_value(context.params)
        return context

    def invoke(self, ctx: Any) -> Any:
        with _told_as_others():  # the options of a command are read here
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        is_known = ctx.resilient_parsing or self.get_command(ctx, word) is not None
        if not is_known and not word.startswith("-"):
            lines = lines_for(word, self.list_commands(ctx))
            raise UserError(f"there is no command {shortened(word)!r}", lines)
        name, command, rest = super().resolve_command(ctx, args)
        _refuse_empty_paths(command, rest)
        return name, command, rest


@contextmanager
def _told_as_others() -> Iterator[None]:
    """Raises faults of options and of paths as `UserError`, with cause and fix."""
    try:
        yield
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # this error shows the help
            raise
        raise _mistake(error) from error
    except OSError as error:
        if fault := fault_of_path(error):
            raise fault from error
        raise


def refuse_what_is_no_value(given: Mapping[str, Any]) -> None:
    """Refuse an option as another option's value: where a pasted line has lost an address, the next
    option would be taken for it. Refuse an empty value of those that name a run. Raises
    `UserError`."""
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, str) and item.startswith("--"):
                raise _without_value(option, shortened(item))
            if item == "" and option in NAMING:
                raise _without_value(option, "''")


def _paths_of(command: Any) -> list[Any]:
    """The command's options and arguments that take a path."""
    if getattr(command, "callback", None) is None:  # an unknown command, or a group of commands
        return []
    hints = get_type_hints(inspect.unwrap(command.callback))
    kinds = {name: _kinds_in(hint) for name, hint in hints.items()}
    return [it for it in command.params if Path in kinds.get(it.name, ())]


def _kinds_in(hint: Any) -> set[Any]:
    return {hint}.union(*map(_kinds_in, get_args(hint)))


def _refuse_empty_paths(command: Any, words: Sequence[str]) -> None:
    """Refuse an empty path, which comes from a variable that is not set. It would mean the
    directory that the user happens to be in: fill it, or prepare all that lies there. Of `NAMING`
    none is empty either. Raises `UserError`."""
    paths = _paths_of(command)
    with_values = _words_before_values(getattr(command, "params", ()))
    not_empty = _words_before_values(paths) | with_values.intersection(NAMING)
    empty = [before for before, word in pairwise(["", *words]) if not word]
    joined = [word[:-1] for word in words if word.endswith("=")]
    for option in (word for word in (*empty, *joined) if word in not_empty):
        raise _without_value(option, "''")
    takes_places = any(it.param_type_name == "argument" for it in paths)
    if takes_places and any(word not in with_values for word in empty):
        raise UserError(
            f"one of the paths behind {command.name} is empty: ''",
            "write a path there (a variable that is not set leaves none), or leave it out",
        )


def _words_before_values(params: Iterable[Any]) -> set[str]:
    """The names of the options that take a value."""
    options = (it for it in params if it.param_type_name == "option" and not it.is_flag)
    return {word for it in options for word in it.opts}


def _without_value(option: str, following: str) -> UserError:
    return UserError(
        f"{option} stands without a value: {following} follows it",
        f"write its value behind {option}, or leave it out",
    )


def _mistake(error: Any) -> UserError:
    place = error.ctx.command_path if error.ctx is not None else "p2p-dtfm"
    more = f"{place} --help lists what it takes"
    parameter = getattr(error, "param", None)
    if (option := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        near = tuple(f"did you mean {name}?" for name in error.possibilities or ())
        return UserError(f"{place} has no option {shortened(option)}", (*near, more))
    if isinstance(error.__cause__, ValidationError) and parameter is not None:
        item = error.__cause__.errors()[0]
        name = max(parameter.opts, key=len)
        said = shortened(str(item["input"]))
        help_text = str(getattr(parameter, "help", None) or "").rstrip(".")
        if help_text[1:2].islower():
            help_text = help_text[0].lower() + help_text[1:]
        fix = f"{name}: {help_text}" if help_text else more
        words = in_plain_words(item)
        _, is_choice, choices = words.rstrip(".").partition(" is not one of ")
        words = f"must be one of {choices}" if is_choice else words
        return UserError(f"{name}: {words}, not {said!r}", fix)
    cause = str(error.format_message()).strip().rstrip(".")
    if cause.endswith("is not readable"):  # no help says more of it
        more = MAY_USE_IT
    return UserError(f"{place}: {cause[:1].lower()}{cause[1:]}", more)


def fault_of_path(error: OSError) -> UserError | None:
    """What is wrong with a path that somebody has typed, if the system refuses even to look at it.
    None: the error has another cause."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "" if error.filename is None else f" ({shortened(str(error.filename))})"
        return UserError(f"a disk is full: {error.strerror}{what}", "free space there")
    if error.errno == errno.ENOENT and _is_nowhere():
        fix = "cd to another one, and type it again"
        return UserError("the directory that you are in is there no more", fix)
    if error.errno == errno.ENOENT and error.filename is None:
        return _fault_of_temporary_files()
    if not isinstance(error.filename, str):
        return None
    cause = f"cannot use {shortened(error.filename)}: {error.strerror}"
    if error.errno == errno.ENAMETOOLONG:
        return UserError(cause, "give a path here; an invitation goes with --invite LINE")
    if error.errno in (errno.EACCES, errno.ELOOP, errno.EROFS, errno.ENOTDIR):
        return UserError(cause, MAY_USE_IT)
    return None


def _fault_of_temporary_files() -> UserError | None:
    """Python names no path where it finds no folder for them, as on a full disk."""
    try:
        temporary_folder()
    except UserError as fault:
        return fault
    return None


def _is_nowhere() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def lines_for(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """What to type in place of `p2p-dtfm WORD`; `known`: all commands."""
    if word.startswith("/"):
        return (f"an address stands behind its option: p2p-dtfm --initial-peers {word}",)
    if word.startswith(PREFIX):
        return (f"an invitation stands behind its option: p2p-dtfm --invite {word}",)
    if word.endswith(".toml"):
        return (f"a run spec stands behind its option: p2p-dtfm --run {shlex.quote(word)}",)
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

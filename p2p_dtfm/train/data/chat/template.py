"""A model's chat template: how its conversations are written down, and which part of them counts.

A template is a program of the model's maker. It runs in Jinja's sandbox, with nothing of this
machine in reach. How much it writes and what memory it takes is bounded; how long it runs is not.
"""

import datetime
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.chat.bounded_memory import bounded_memory
from p2p_dtfm.train.data.chat.conversations import Conversation, Exchange, Message, as_given
from p2p_dtfm.train.data.tokenizer import END_OF_DOCUMENT, Tokenizer

CONFIGURATION_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_LIMIT_BYTES = 1 << 18
WRITTEN_LIMIT_CHARACTERS = 1 << 26
POWER_LIMIT = 64
REPEATED_LIMIT = 1 << 16
MEMORY_LIMIT_BYTES = 1 << 30
"""What a template may take beyond the memory that the process has. Without a bound one width of a
number is enough to ask for all memory."""
_FILE_LIMIT_BYTES = 64 << 20
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""Marks that some templates carry. They are not needed to find what counts."""
_MISTAKES = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)
"""What a wrong template may raise, besides what Jinja itself refuses."""


_ANSWERED = (Message("user", "What is it?"), Message("assistant", "An answer."))
"""A conversation that shows what a template writes behind an answer."""


class NotTheSame(ValueError):
    """The template writes earlier messages otherwise when more messages follow."""


class RefusedByTemplate(UserError):
    """A template refuses one conversation; it need not refuse others."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(*_unusable_because(None, reason))


@dataclass(frozen=True)
class ChatForm:
    """How a model's conversations are written."""

    template: str | None = None
    special: dict[str, int] = field(default_factory=dict)
    """Control tokens by name: a tokenizer never makes them of plain text."""
    plain: frozenset[str] = frozenset()
    """Those control tokens that may stand in anybody's words, such as runs of spaces or lines."""
    blank_before: frozenset[str] = frozenset()
    """Those that take along the blanks before them, as `lstrip` of a tokenizer says."""
    blank_behind: frozenset[str] = frozenset()
    """The same of the blanks behind them (`rstrip`)."""
    names: dict[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token` and others that templates refer to by name."""


Part = tuple[str | int, bool]
"""Text or a token, and whether it counts."""


def read_chat_form(directory: Path, tokenizer: Path | None = None) -> ChatForm:
    """From a model's directory, or the origin/ of an imported model. Raises `UserError`.

    `tokenizer`: the file that names the control tokens of a directory without a tokenizer, such as
    one with a template alone. The template's text would else become plain pieces.
    """
    configuration = _json_of(directory / CONFIGURATION_NAME)
    own = directory / TOKENIZER_NAME
    named_in = own if tokenizer is None or own.is_file() else tokenizer
    special, plain = {}, set()
    blank: dict[str, set[str]] = {"lstrip": set(), "rstrip": set()}
    stated = _json_of(named_in).get("added_tokens")
    for added in stated if isinstance(stated, list) else ():
        if isinstance(added, dict) and isinstance(added.get("id"), int):
            special[str(added.get("content"))] = int(added["id"])
            if added.get("special") is False:
                plain.add(str(added.get("content")))
            for side, there in blank.items():
                if added.get(side) is True:
                    there.add(str(added.get("content")))
    names = {}
    for key, value in configuration.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            names[key] = content
    template = _template_in(directory, configuration.get("chat_template"))
    before, behind = frozenset(blank["lstrip"]), frozenset(blank["rstrip"])
    plain -= set(names.values())
    return ChatForm(template, special, frozenset(plain), before, behind, names)


def read_template(directory: Path) -> str | None:
    """A model's chat template, if it has one. Raises `UserError`."""
    return _template_in(directory, _json_of(directory / CONFIGURATION_NAME).get("chat_template"))


def _template_in(directory: Path, template: Any) -> str | None:
    """The template from its own file, or else the one that the configuration states."""
    path = directory / TEMPLATE_NAME
    try:
        if path.is_file():
            template = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unusable(directory, str(error)) from error
    if isinstance(template, list):  # several templates, by name
        tables = (each for each in template if isinstance(each, dict))
        named = (each.get("template") for each in tables if each.get("name") == "default")
        template = next(named, None)
    if template is not None and not isinstance(template, str):
        raise _unusable(directory, "its chat template is no text")
    if template is not None and len(template.encode("utf-8", "replace")) > TEMPLATE_LIMIT_BYTES:
        raise _unusable(directory, f"its chat template is longer than {TEMPLATE_LIMIT_BYTES} bytes")
    return template


class ChatWriter:
    """Writes conversations as tokens. Raises `UserError` for a template that cannot be used."""

    def __init__(self, form: ChatForm, tokenizer: Tokenizer) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._render = _renderer(form) if form.template else None
        self._split = _any_of(set(form.special))
        self._control = _any_of(set(form.special) - form.plain)
        end = form.names.get("eos_token")  # one that is no token would end them as pieces of text
        usual = end if end in form.special else tokenizer.end_of_document
        self._end: str | int = self._end_of_answers(usual)

    def spells_out_control(self, conversation: Conversation) -> bool:
        """Whether somebody's words hold what would be read as the end or beginning of a turn."""
        if isinstance(conversation, Exchange):
            texts = [conversation.prompt, conversation.completion]
        else:
            texts = [message.content for message in conversation]
        found = self._control
        return any(END_OF_DOCUMENT in text or (found and found.search(text)) for text in texts)

    def tokens(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and whether each counts. Raises `NotTheSame` and `UserError`."""
        tokens: list[np.ndarray] = []
        counts: list[np.ndarray] = []
        begins, start = True, self._tokenizer.start_of_document
        if start is not None and isinstance(conversation, Exchange):  # a template writes its own
            tokens.append(np.array([start], dtype=np.uint32))
            counts.append(np.zeros(1, dtype=bool))
        for text, counts_here in self._parts(conversation):
            piece, begins = self._encode(text, begins)
            tokens.append(piece)
            counts.append(np.full(len(piece), counts_here))
        return np.concatenate(tokens), np.concatenate(counts)

    def each_answer(self, conversation: Conversation) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same for a template that writes the last answer otherwise than earlier ones. The
        conversation is given once for each answer, and ends there; only that answer counts. Raises
        `UserError`."""
        assert not isinstance(conversation, Exchange)
        for number, message in enumerate(conversation):
            if message.role != "assistant":
                continue
            asked, said = self._answer(conversation, number)
            asked_text, answer_text = self._apart(asked, said[len(asked) :])
            before, begins = self._encode(asked_text, True)
            answer, _ = self._encode(answer_text, begins)
            counts = np.arange(len(before) + len(answer)) >= len(before)
            yield np.concatenate([before, answer]), counts

    @property
    def filling(self) -> int:
        """The token that fills a sequence behind its last conversation."""
        return int(self._encode(self._end, True)[0][-1])

    def _parts(self, conversation: Conversation) -> Iterator[Part]:
        if isinstance(conversation, Exchange):
            yield conversation.prompt, False
            yield conversation.completion, True
            yield self._end, True
            return
        if self._render is None:
            raise UserError(
                "conversations of messages need a chat template, and none was named",
                (
                    "name a directory of the model, or the origin/ that import wrote: --chat DIR",
                    'write rows with "prompt" and "completion" instead',
                ),
            )
        written, texts = "", [""]
        for number, message in enumerate(conversation):
            if message.role != "assistant":
                continue
            asked, said = self._answer(conversation, number)
            if not asked.startswith(written):
                raise NotTheSame
            for text in (asked[len(written) :], said[len(asked) :]):
                texts[-1:] = self._apart(texts[-1], text)
            written = said
        for place, text in enumerate(texts[1:]):
            yield text, place % 2 == 1

    def _answer(self, conversation: tuple[Message, ...], number: int) -> tuple[str, str]:
        """What the template writes before an answer, and the same with the answer."""
        assert self._render is not None
        try:
            asked: str = self._render(conversation[:number], True)
        except RefusedByTemplate as error:
            if number:
                raise
            raise RefusedByTemplate(f"begins with an answer: {error.reason}") from error
        said: str = self._render(conversation[: number + 1], False)
        if not said.startswith(asked):
            raise RefusedByTemplate("an answer does not begin with what asks for one")
        return asked, said

    def _end_of_answers(self, usual: str | int) -> str | int:
        """What the template writes behind an answer; there the trained model stops. If the model's
        usual end of texts is among it, it is that one, else the last control token."""
        if self._render is None or self._control is None:
            return usual
        try:
            asked, said = self._answer(_ANSWERED, 1)
        except UserError:  # a template that refuses rows too is reported for those
            return usual
        behind = said[len(asked) :].partition(_ANSWERED[1].content)[2]
        found = self._control.findall(behind)
        return usual if usual in found or not found else str(found[-1])

    def _encode(self, text: str | int, begins: bool) -> tuple[np.ndarray, bool]:
        """Tokens of a text; control tokens are made where they are spelt out. Only the template
        spells them out, since conversations whose words do so are left out. `begins`: whether this
        text is the beginning of one. Also returns whether what follows is a beginning."""
        if isinstance(text, int):
            return np.array([text], dtype=np.uint32), self._tokenizer.begins_after_control
        pieces = [np.empty(0, dtype=np.uint32)]
        for piece in self._cut(text):
            if piece in self._form.special:
                pieces.append(np.array([self._form.special[piece]], dtype=np.uint32))
                begins = self._tokenizer.begins_after_control
            elif piece:
                encoded = piece.encode("utf-8", errors="replace")
                pieces += self._tokenizer.encode_batch([encoded], [not begins])
                begins = False
        return np.concatenate(pieces).astype(np.uint32), begins

    def _apart(self, before: str, behind: str) -> tuple[str, str]:
        """Two texts that follow each other, without the blanks that a control token at the end of
        one takes along from the other."""
        if before.rstrip().endswith(tuple(self._form.blank_behind)):
            behind = behind.lstrip()
        if behind.lstrip().startswith(tuple(self._form.blank_before)):
            before = before.rstrip()
        return before, behind

    def _cut(self, text: str) -> list[str]:
        """Control tokens, and the text before, between and behind them."""
        if self._split is None:
            return [text]
        found = self._split.split(text)
        for place in range(1, len(found), 2):
            if found[place] in self._form.blank_before:
                found[place - 1] = found[place - 1].rstrip()
            if found[place] in self._form.blank_behind:
                found[place + 1] = found[place + 1].lstrip()
        return found


def _any_of(words: set[str]) -> re.Pattern[str] | None:
    """Finds any of these words, the longest first. A group, so that splitting keeps them."""
    longest = sorted(words, key=lambda word: (-len(word), word))
    return re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None


def _renderer(form: ChatForm) -> Any:
    import jinja2
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        """A sandbox in which no multiplication makes something much larger."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and abs(right) > POWER_LIMIT:
                raise jinja2.TemplateError(f"a power of {right}")
            for repeated, times in ((left, right), (right, left)):
                repeats = isinstance(repeated, str | list | tuple) and isinstance(times, int)
                if repeats and len(repeated) * times > REPEATED_LIMIT:
                    raise jinja2.TemplateError(f"it repeats something {times} times")
            return super().call_binop(context, operator, left, right)

    def refuse(reason: str) -> str:
        raise jinja2.TemplateError(reason)

    environment = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    now = datetime.datetime.now()  # one day for all conversations, however long it takes
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now.strftime  # as transformers does
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    assert form.template is not None
    try:
        with bounded_memory(MEMORY_LIMIT_BYTES):  # constant expressions are computed here already
            compiled = environment.from_string(_GENERATION.sub("", form.template))
    except (jinja2.TemplateError, *_MISTAKES) as error:
        raise _unusable(None, str(error)) from error

    def render(messages: tuple[Message, ...], asks: bool) -> str:
        pieces, length = [], 0
        values = {
            "messages": as_given(messages),
            "tools": None,  # not undefined: templates ask `is not none`, as transformers has it
            "documents": None,
            "add_generation_prompt": asks,
            **form.names,
        }
        try:
            with bounded_memory(MEMORY_LIMIT_BYTES):
                for piece in compiled.generate(values):
                    pieces.append(piece)
                    length += len(piece)
                    if length > WRITTEN_LIMIT_CHARACTERS:
                        raise _unusable(None, "it writes without end")
        except MemoryError as error:
            raise _unusable(None, "it takes more memory than it may") from error
        except (SecurityError, RecursionError) as error:
            raise _unusable(None, str(error)) from error
        except (jinja2.TemplateError, *_MISTAKES) as error:
            raise RefusedByTemplate(str(error)) from error
        return "".join(pieces)

    return render


def _json_of(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _FILE_LIMIT_BYTES:
            raise ValueError("it is too large")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path.parent, f"{path.name} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _unusable(directory: Path | None, why: str) -> UserError:
    return UserError(*_unusable_because(directory, why))


def _unusable_because(directory: Path | None, why: str) -> tuple[str, tuple[str, ...]]:
    where = "the chat template" if directory is None else f"the chat template of {directory}"
    return (
        f"{where} cannot be used: {why}",
        (
            "name another model's directory with --chat",
            'write rows with "prompt" and "completion", which need no template',
        ),
    )

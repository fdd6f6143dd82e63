"""Conversations out of JSON lines, and of rows of tables with the same fields.

{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
{"prompt": "...", "completion": "..."}
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.documents import LINE_LIMIT_BYTES, Form, form_of, pyarrow_needed
from p2p_dtfm.train.data.formats.compressed import open_lines
from p2p_dtfm.train.data.text_files import Skipped, find_files

MESSAGES_LIMIT = 1024
_EXAMPLES = 3
_REASON_CHARACTERS = 200


class Message(msgspec.Struct, frozen=True):
    """One turn; other fields of a turn are ignored."""

    role: Literal["system", "user", "assistant"]
    content: str


class _Turn(msgspec.Struct, frozen=True, rename={"sender": "from"}):
    """The same turn as ShareGPT writes it."""

    sender: Literal["system", "human", "user", "gpt", "chatgpt", "bing", "bard", "assistant"]
    value: str

    def as_message(self) -> Message:
        role: Literal["system", "user", "assistant"] = "assistant"
        if self.sender == "system":
            role = "system"
        elif self.sender in ("human", "user"):
            role = "user"
        return Message(role, self.value)


class _ChatRow(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...] | None = None
    conversations: tuple[_Turn, ...] | None = None
    prompt: str | None = None
    completion: str | None = None


@dataclass(frozen=True)
class Exchange:
    """A text that is given, and the text that is to be learnt as its answer."""

    prompt: str
    completion: str


Conversation = tuple[Message, ...] | Exchange


@dataclass
class RowsLeftOut:
    """Rows that cannot be used, by reason."""

    unreadable: int = 0
    without_answer: int = 0
    with_control_tokens: int = 0
    refused: int = 0
    refused_examples: list[str] = field(default_factory=list)
    too_long: int = 0
    shortened: int = 0
    """Rows that are used only as far as a sequence reaches."""

    def note_refused(self, where: str, reason: str) -> None:
        self.refused += 1
        if len(self.refused_examples) < _EXAMPLES:
            self.refused_examples.append(f"{where}: {reason[:_REASON_CHARACTERS]}")

    def __str__(self) -> str:
        examples = "; ".join(self.refused_examples)
        counts = {
            "not a conversation": self.unreadable,
            "without an answer": self.without_answer,
            "spelling out control tokens": self.with_control_tokens,
            f"refused by the chat template ({examples})": self.refused,
            "whose answer begins beyond a sequence": self.too_long,
        }
        said = [f"{count} rows {why}" for why, count in counts.items() if count]
        if self.shortened:
            said.append(f"{self.shortened} cut to a sequence's length")
        return ", ".join(said) or "nothing"


def read_conversations(
    paths: list[Path], left_out: RowsLeftOut
) -> Iterator[tuple[Conversation, bytes, str]]:
    """Each row that is a conversation, with its line and where that is. Raises `UserError`."""
    for path in paths:
        try:
            for number, line in _lines(path):
                if line.strip():
                    found = _conversation(line, left_out)
                    if found is not None:
                        yield found, line, f"{path}, line {number}"
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror}", "check its name and its permissions"
            ) from error


def conversation_files(paths: list[Path], out: Path) -> list[Path]:
    """The files that are named, and all with rows in named directories. Raises `UserError`."""
    found = find_files(paths, [], out, Skipped())
    files = [file.path for file in found if file.named or form_of(file.path) is not Form.TEXT]
    if not files:
        raise UserError(
            f"no files of conversations in {', '.join(map(str, paths))}",
            "name files of JSON lines (.jsonl) or Parquet, or directories with some",
        )
    return files


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered JSON lines, which a table's rows become, too. Raises `UserError` and OSError."""
    form = form_of(path)
    if form in (Form.PARQUET, Form.ARROW):
        with pyarrow_needed(path, form):
            from p2p_dtfm.train.data.formats.tables import read_rows

            rows = read_rows(path, form is Form.PARQUET, set(_ChatRow.__struct_fields__))
            for number, row in enumerate(rows, 1):
                yield number, msgspec.json.encode(row)
        return
    with open_lines(path, LINE_LIMIT_BYTES) as lines:
        yield from lines


def _conversation(line: bytes, left_out: RowsLeftOut) -> Conversation | None:
    try:
        row = msgspec.json.decode(line, type=_ChatRow)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        left_out.unreadable += 1
        return None
    messages = row.messages
    if messages is None and row.conversations is not None:
        messages = tuple(turn.as_message() for turn in row.conversations)
    if messages is not None and len(messages) <= MESSAGES_LIMIT:
        if not any(message.role == "assistant" and message.content for message in messages):
            left_out.without_answer += 1
            return None
        return messages
    if row.prompt is None or row.completion is None:
        left_out.unreadable += 1
        return None
    if not row.completion:
        left_out.without_answer += 1
        return None
    return Exchange(row.prompt, row.completion)


def as_given(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """The messages as a template reads them."""
    return [{"role": message.role, "content": message.content} for message in messages]

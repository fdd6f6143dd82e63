"""Conversations out of JSON lines.

{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
{"prompt": "...", "completion": "..."}
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.documents import LINE_LIMIT_BYTES

MESSAGES_LIMIT = 1024
_EXAMPLES = 3
_REASON_CHARACTERS = 200


class Message(msgspec.Struct, frozen=True):
    """One turn; other fields of it mean nothing here."""

    role: Literal["system", "user", "assistant"]
    content: str


class _Row(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    completion: str | None = None


@dataclass(frozen=True)
class Exchange:
    """A text that is given, and the one that is to be learnt."""

    prompt: str
    completion: str


Conversation = tuple[Message, ...] | Exchange


@dataclass
class LeftOut:
    """Rows that cannot be used, by reason."""

    unreadable: int = 0
    without_answer: int = 0
    with_control_tokens: int = 0
    refused: int = 0
    refused_examples: list[str] = field(default_factory=list)
    too_long: int = 0
    shortened: int = 0
    """Used, as far as a sequence reaches."""

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
    paths: list[Path], left_out: LeftOut
) -> Iterator[tuple[Conversation, bytes, str]]:
    """Each row that is one, with its line and where that is. Raises `UserError`."""
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(iter(lambda: file.readline(LINE_LIMIT_BYTES), b"")):
                    if len(line) == LINE_LIMIT_BYTES:
                        raise UserError(
                            f"line {number + 1} of {path} is longer than "
                            f"{LINE_LIMIT_BYTES >> 20} MiB",
                            "cut its text into several lines",
                        )
                    if line.strip():
                        found = _conversation(line, left_out)
                        if found is not None:
                            yield found, line, f"{path}, line {number + 1}"
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror}", "check its name and its permissions"
            ) from error


def _conversation(line: bytes, left_out: LeftOut) -> Conversation | None:
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        left_out.unreadable += 1
        return None
    if row.messages is not None and len(row.messages) <= MESSAGES_LIMIT:
        if not any(message.role == "assistant" and message.content for message in row.messages):
            left_out.without_answer += 1
            return None
        return row.messages
    if row.prompt is None or row.completion is None:
        left_out.unreadable += 1
        return None
    if not row.completion:
        left_out.without_answer += 1
        return None
    return Exchange(row.prompt, row.completion)


def as_given(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """What a template reads."""
    return [{"role": message.role, "content": message.content} for message in messages]

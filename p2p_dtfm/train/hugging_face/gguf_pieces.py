"""A tokenizer of Llama's family as llama.cpp has them: pieces with scores, in place of merges.

llama.cpp merges the two neighbours that make the piece of the highest score. A tokenizer.json lists
the pairs that are merged, in order. Both do the same under two conditions: every pair that spells a
piece makes it, and each piece's pairs stand together in the list. Lists made from a SentencePiece
model are like this.
"""

from collections.abc import Mapping
from typing import Any

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.tokens.sentence_pieces import BYTE_PIECES

_SPECIAL_SCORE, _UNUSED_SCORE = -1000.0, -10000.0
"""Scores of pieces that nothing is merged to."""


def describe_pieces(
    writer: Any, content: Mapping[str, Any], pieces: list[str], types: list[Any], kinds: Any
) -> None:
    """`pieces` and `types` as for other tokenizers. Raises `UserError` for merges that scores
    cannot express."""
    merges = [
        merge.split(" ", 1) if isinstance(merge, str) else merge
        for merge in content["model"].get("merges") or ()
    ]
    known = content["model"]["vocab"]
    scores = _scores(known, [(left, right) for left, right in merges])
    of_bytes = {known[piece] for piece in BYTE_PIECES}
    unknown = known.get(content["model"].get("unk_token"))
    told, kinds_told = [], []
    for token, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
        score = scores.get(piece, 0.0 if len(piece) == 1 else _SPECIAL_SCORE)
        if token == unknown:
            kind = kinds.UNKNOWN
        elif token in of_bytes:
            kind, score = kinds.BYTE, 0.0
        elif kind == kinds.UNUSED:
            score = _UNUSED_SCORE
        elif kind == kinds.NORMAL and score == _SPECIAL_SCORE:
            kind = kinds.CONTROL  # no text turns into it
        told.append(score)
        kinds_told.append(kind)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(told)
    writer.add_token_types(kinds_told)
    writer.add_add_space_prefix(_begins_with_space(content))
    if unknown is not None:
        writer.add_unk_token_id(unknown)


def _scores(known: Mapping[str, int], merges: list[tuple[str, str]]) -> dict[str, float]:
    """The score of each piece that merges make: minus its place in the order of the merges."""
    scores: dict[str, float] = {}
    last = None
    for left, right in merges:
        piece = left + right
        if piece != last and piece in scores:
            raise _unlike(piece, "its pairs do not stand together")
        scores.setdefault(piece, -float(len(scores) + 1))
        last = piece
    listed = set(merges)
    for piece in scores:
        for cut in range(1, len(piece)):
            pair = piece[:cut], piece[cut:]
            if pair[0] in known and pair[1] in known and pair not in listed:
                raise _unlike(piece, f"it is not made of {pair[0]!r} and {pair[1]!r}")
    return scores


def _unlike(piece: str, why: str) -> UserError:
    return UserError(
        f"llama.cpp would split texts into other tokens: of the tokenizer's piece {piece[:40]!r} "
        f"{why}, and there every pair that spells a piece makes it",
        "export for transformers: --format hf",
    )


def _begins_with_space(content: Mapping[str, Any]) -> bool:
    between = content.get("pre_tokenizer") or {}
    if between.get("type") == "Metaspace":
        return bool(between.get("prepend_scheme", "always") != "never")
    before = content.get("normalizer") or {}
    return any(step.get("type") == "Prepend" for step in (before, *before.get("normalizers", ())))

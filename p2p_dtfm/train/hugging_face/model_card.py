"""README.md of an exported model: what it is, what it learned from, and who trained it."""

from collections.abc import Sequence
from dataclasses import dataclass

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.data.manifest import Notes
from p2p_dtfm.train.hugging_face.families import CLASSES, family_of

CARD_NAME = "README.md"
ROWS = 12
UNSAID = "not stated"


@dataclass(frozen=True)
class KnownOfModel:
    """What a home knows of a model besides its weights. Losses are (step, nats for each token)."""

    tokens: int | None = None
    notes: Notes | None = None
    members: Sequence[str] = ()
    """Ids of all peers that were in a view together with this peer."""
    losses: Sequence[tuple[int, float]] = ()
    held_out: Sequence[tuple[int, float]] = ()


def model_card(spec: RunSpec, step: int, told: KnownOfModel, is_adapter: bool = False) -> str:
    """The card in the form that model hubs read: a table of keys, then Markdown."""
    parts = [_head(is_adapter), f"# {_line(spec.name)}", _what(spec, step, told), _data(told.notes)]
    if told.losses or told.held_out:
        parts.append(_curve(told))
    if told.members:
        parts.append(_who(told.members))
    parts.append(_use_of_adapter(spec.model) if is_adapter else _use(spec.model))
    return "\n\n".join(parts) + "\n"


def _head(is_adapter: bool) -> str:
    library = "peft" if is_adapter else "transformers"
    tags = "\n".join(f"- {tag}" for tag in ("p2p-dtfm", "decentralized-training"))
    keys = f"library_name: {library}\npipeline_tag: text-generation\ntags:\n{tags}"
    return f"---\n{keys}\n---"


def _what(spec: RunSpec, step: int, told: KnownOfModel) -> str:
    model = spec.model
    rows = [
        ("run", f"`{spec.digest()}`"),
        ("trained", f"{step:,} of {spec.total_steps:,} steps"),
        ("tokens", f"{told.tokens:,}" if told.tokens is not None else UNSAID),
        ("blocks, width, heads", f"{model.layers}, {model.width}, {model.heads}"),
        ("context", counted(model.context, "token")),
        ("vocabulary", counted(model.vocabulary, "token")),
        ("began from", f"given weights `{model.initial}`" if model.initial else "random weights"),
    ]
    if spec.trains_adapters:
        targets = ", ".join(spec.lora.targets)
        rows.append(("adapters", f"rank {spec.lora.rank}, alpha {spec.lora.alpha:g}: {targets}"))
    about = "Trained by ordinary computers together, peer to peer, with p2p-dtfm."
    return about + "\n\n" + _table(("", ""), rows)


def _data(notes: Notes | None) -> str:
    known = (notes.name, notes.licence, notes.source) if notes is not None else ("", "", "")
    rows = [
        (title, _line(text) or UNSAID)
        for title, text in zip(("name", "licence", "source"), known, strict=True)
    ]
    return "## Data\n\n" + _table(("", "as the founder stated it"), rows)


def _curve(told: KnownOfModel) -> str:
    rows: list[tuple[str, str]] = []
    for name, curve in (("training", told.losses), ("held-out text", told.held_out)):
        rows += [(f"{name}, step {step:,}", f"{loss:.4f}") for step, loss in _spread(curve)]
    return "## Loss\n\nIn nats for each token.\n\n" + _table(("", "loss"), rows)


def _spread(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The first and the last point, and some between at equal distances."""
    if len(curve) <= ROWS:
        return list(curve)
    return [curve[index * (len(curve) - 1) // (ROWS - 1)] for index in range(ROWS)]


def _who(members: Sequence[str]) -> str:
    listed = "\n".join(f"- `{member}`" for member in sorted(set(members)))
    return f"## Members\n\nAs the peer that exported it saw them.\n\n{listed}"


def _use(model: ModelSpec) -> str:
    return (
        "## Use\n\n```python\nfrom transformers import AutoTokenizer, "
        f"{CLASSES[family_of(model)]}\n\n"
        f'model = {CLASSES[family_of(model)]}.from_pretrained("this directory")\n'
        'tokenizer = AutoTokenizer.from_pretrained("this directory")\n```'
    )


def _use_of_adapter(model: ModelSpec) -> str:
    return (
        "## Use\n\nOver the model that the run began from.\n\n```python\n"
        f"from peft import PeftModel\nfrom transformers import {CLASSES[family_of(model)]}\n\n"
        f'model = {CLASSES[family_of(model)]}.from_pretrained("that model\'s directory")\n'
        'model = PeftModel.from_pretrained(model, "this directory")\n```'
    )


def _table(titles: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {titles[0]} | {titles[1]} |", "|---|---|"]
    return "\n".join(lines + [f"| {one} | {other} |" for one, other in rows])


def _line(text: str) -> str:
    """A founder's words on one line, which can begin no row, link or heading."""
    plain = " ".join(text.split())
    return "".join(f"\\{sign}" if sign in "|[]<>`*_#\\" else sign for sign in plain)

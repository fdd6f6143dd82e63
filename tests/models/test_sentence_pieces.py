"""Tokenizers of Llama 1 and 2 and TinyLlama give the tokens of transformers, and give text back as
it was."""

import heapq
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer as Tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from p2p_dtfm.cli.commands.data import generate
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.train.data import open_prepared, prepare, tokenizer_from_bytes
from p2p_dtfm.train.data.chat.conversations import Exchange, Message
from p2p_dtfm.train.data.chat.template import ChatWriter, read_chat_form
from p2p_dtfm.train.data.tokens.sentence_pieces import SentencePieces
from p2p_dtfm.train.hugging_face.export import export_hugging_face
from p2p_dtfm.train.hugging_face.gguf_export import export_gguf
from p2p_dtfm.train.hugging_face.model_import import import_hugging_face
from p2p_dtfm.train.hugging_face.tokenizer_json import read_tokenizer_json, start_of_texts
from p2p_dtfm.train.model.generate import _whole_characters
from tests.models.conftest import make_spec, random_states
from tests.models.families import make_model
from tests.models.llamas_tokenizer import LEARNT, SCHEMES, llamas_tokenizer, save_tokenizer
from tests.models.test_families import TRAINING
from tests.train.saved_layers import save_layers

TEXTS = [
    LEARNT,
    "",
    " ",
    "   ",
    "the dog",
    " the dog",
    "  two spaces before, two after  ",
    "\n\n\n",
    "\t\tif x:\n\t\t    return  y\r\n",
    "def walk(tree):\n    return [each for each in tree]\n\n\n",
    "\u00fcber na\u00efve caf\u00e9 e\u0301 \ufb01",
    "\u6a21\u578b \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f642\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea the \U0001f642 dog",
    "\u2581 written as it is \u2581\u2581",
    "zero \x00 byte and <0x41> spelt",
    "a\u00a0b\u3000c\u2028d\ufeff",
    "0123456789 " * 40,
    "the " * 500,
    "x" * 3000,
]


def fuzzed(count: int) -> list[str]:
    chance = random.Random(5)
    alphabet = [
        *"abcdefghij  \n\t.,()=0123",
        "the",
        "dog",
        "\u00e9",
        "\u6a21",
        "\U0001f642",
        "\u2581",
    ]
    return ["".join(chance.choices(alphabet, k=chance.randint(1, 60))) for _ in range(count)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_and_text_are_those_of_transformers(scheme: str, tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "hf", scheme)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    ours = read_tokenizer_json(directory)
    again = tokenizer_from_bytes(ours.to_bytes())
    assert isinstance(again, SentencePieces) and again.to_bytes() == ours.to_bytes()
    assert ours.vocabulary == len(theirs) and ours.end_of_document == 2
    seen: set[int] = set()
    for text in [*TEXTS, *fuzzed(400)]:
        tokens = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text).tolist() == again.encode(text).tolist() == tokens, text
        assert ours.decode(tokens) == theirs.decode(tokens), text
        seen |= set(tokens)
    assert len(seen) > 150, "pieces, characters and bytes all occur"
    chance = random.Random(9)
    for _ in range(400):  # whatever a model may write
        tokens = chance.choices(range(3, ours.vocabulary), k=chance.randint(1, 20))
        assert ours.decode(tokens) == theirs.decode(tokens)


def test_files_of_transformers_5_are_read(tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "hf"))
    theirs.save_pretrained(tmp_path / "again")
    ours = read_tokenizer_json(tmp_path / "again")
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]


def test_no_text_turns_into_a_control_token(tmp_path: Path) -> None:
    content = llamas_tokenizer()
    size = len(content["model"]["vocab"])
    for number, added in enumerate(["<|im_end|>", "\u00a7"]):
        content["added_tokens"].append(
            {**content["added_tokens"][0], "id": size + number, "content": added}
        )
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours = read_tokenizer_json(tmp_path)
    assert ours.vocabulary == size + 2
    tokens = set(ours.encode("<s> <unk> </s> <|im_end|> \u00a7 <0x41>").tolist())
    assert not tokens & {0, 1, 2, size, size + 1, content["model"]["vocab"]["<0x41>"]}
    assert ours.decode([size]) == "<|im_end|>" and ours.decode([1]) == "<s>"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_long_text_comes_back_as_it_was(scheme: str, tmp_path: Path) -> None:
    """The text is encoded in pieces, and only the first piece is the beginning of a text."""
    text = "".join(f"the dog no. {number} jumps over  the fox\n" for number in range(3000))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "more.txt").write_text("the lazy dog. " * 300)
    tokenizer = read_tokenizer_json(save_tokenizer(tmp_path / "hf", scheme))
    out = tmp_path / "out"
    manifest = prepare(
        [tmp_path / "long.txt"], out, context=16, tokenizer=tokenizer,
        validation=[tmp_path / "more.txt"],
    )  # fmt: skip
    data = open_prepared(out)
    shards = [data.store.held(shard.digest) for shard in manifest.shards_in("train")]
    tokens = np.concatenate([np.fromfile(path, dtype="<u2") for path in shards])
    assert (tokens == 2).sum() == 1 and tokens[-1] == 2
    assert (tokens == 1).sum() == 1 and tokens[0] == 1
    assert data.tokenizer.decode(tokens[1:-1]) == text


@pytest.mark.parametrize("scheme", SCHEMES)
def test_documents_and_prompts_begin_as_texts_do_in_transformers(
    scheme: str, tmp_path: Path
) -> None:
    """No token was written before them, while everybody who uses the model begins with its
    `<s>`."""
    directory = save_tokenizer(tmp_path / "hf", scheme)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    tokenizer = read_tokenizer_json(directory)
    rows = [f"the dog no. {number} jumps" for number in range(99)]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    manifest = prepare(
        [lines], tmp_path / "rows", context=8, tokenizer=tokenizer, held_out_fraction=0.2
    )
    assert manifest.tokenizer.start_of_document == 1
    data = open_prepared(tmp_path / "rows")
    assert data.tokenizer.start_of_document == 1
    found = []
    for shard in manifest.shards:
        tokens = np.fromfile(data.store.held(shard.digest), dtype="<u2").tolist()
        assert tokens[-1] == 2
        found += " ".join(map(str, tokens)).removesuffix(" 2").split(" 2 ")
    assert sorted(found) == sorted(" ".join(map(str, theirs(row)["input_ids"])) for row in rows)
    writer = ChatWriter(read_chat_form(directory), tokenizer)
    tokens, counts = writer.tokens(Exchange("the dog", " jumps"))
    asked = theirs("the dog")["input_ids"]
    assert asked[0] == 1 and tokens.tolist()[: len(asked)] == asked and tokens[-1] == 2
    assert not counts[: len(asked)].any() and counts[len(asked) :].all()


def test_each_part_of_a_text_that_is_held_out_or_not_begins_as_texts_do(tmp_path: Path) -> None:
    text = "".join(f"the dog no. {number} jumps over  the fox\n" for number in range(3000))
    (tmp_path / "long.txt").write_text(text)
    tokenizer = read_tokenizer_json(save_tokenizer(tmp_path / "hf"))
    out = tmp_path / "out"
    manifest = prepare(
        [tmp_path / "long.txt"], out, context=16, tokenizer=tokenizer, held_out_fraction=0.2
    )
    data = open_prepared(out)
    for split in ("train", "held_out"):
        shards = [data.store.held(shard.digest) for shard in manifest.shards_in(split)]
        tokens = np.concatenate([np.fromfile(path, dtype="<u2") for path in shards])
        ends, starts = np.flatnonzero(tokens == 2), np.flatnonzero(tokens == 1)
        assert len(ends) > 1 and starts.tolist() == [0, *(ends[:-1] + 1).tolist()]


def test_without_the_models_own_files_an_export_begins_texts_so_too(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "hf")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    tokenizer = read_tokenizer_json(directory)
    spec = make_spec(vocabulary=tokenizer.vocabulary, layers=1)
    checkpoint = save_layers(tmp_path / "checkpoints", spec, 0, 0, random_states(spec))
    export_hugging_face(checkpoint, tmp_path / "out", tokenizer)
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = theirs("the dog")["input_ids"]
    assert again("the dog")["input_ids"] == expected and again.bos_token_id == expected[0] == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] == 1
    assert read_tokenizer_json(tmp_path / "out").start_of_document == 1
    export_gguf(checkpoint, tmp_path / "model.gguf", tokenizer)
    fields = GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.bos_token_id"].contents() == 1
    assert fields["tokenizer.ggml.add_bos_token"].contents()


def test_what_stands_before_a_text_may_be_one_step_of_several_or_no_token_at_all() -> None:
    step = llamas_tokenizer()["post_processor"]
    several = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, step]}
    assert start_of_texts({"post_processor": several}) == 1
    two = {**step, "special_tokens": {"<s>": {"id": "<s>", "ids": [1, 2], "tokens": []}}}
    none = {**step, "single": step["single"][1:]}
    for other in (None, 5, [step], {"processors": 5}, {"single": [[]]}, two, none):
        assert start_of_texts({"post_processor": other}) is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_written_streams_with_its_spaces(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_tokenizer(tmp_path / "hf", scheme)
    size = read_tokenizer_json(directory).vocabulary
    model = make_model("llama", vocab_size=size, eos_token_id=2)
    model.lm_head.weight.data[:259] = 0  # neither control tokens nor bytes, most of them no text
    model.save_pretrained(directory)
    import_hugging_face(directory, tmp_path / "new", "", TRAINING)
    generate(tmp_path / "new", prompt="the dog", tokens=10, temperature=0.0, seed=0)
    printed = capsys.readouterr().out.removesuffix("\n")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    tokens = theirs("the dog")["input_ids"]
    for _ in range(10):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert printed == theirs.decode(tokens[1:]) and " " in printed.removeprefix("the dog")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_part_of_a_stream_is_text(scheme: str, tmp_path: Path) -> None:
    tokenizer = read_tokenizer_json(save_tokenizer(tmp_path / "hf", scheme))
    for text in TEXTS:
        if "\u2581" in text:
            continue  # any of these tokenizers reads it as a space from then on
        if text.startswith(" ") and scheme in ("first", "always"):
            continue  # there the space before a text is the one put before it: transformers' too
        tokens = tokenizer.encode(text).tolist()
        parts = list(_whole_characters(tokenizer, iter(tokens), goes_on=False))
        assert "".join(parts) == text and not any("\ufffd" in part for part in parts)
        (middle,) = tokenizer.encode_batch([text.encode()], [True])
        assert "".join(_whole_characters(tokenizer, iter(middle), goes_on=True)) == text


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_conversations_are_the_tokens_of_transformers(scheme: str, tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "hf", scheme, chat_template=TEMPLATE)
    writer = ChatWriter(read_chat_form(directory), read_tokenizer_json(directory))
    said = [("user", "the dog?"), ("assistant", "jumps"), ("user", "why"), ("assistant", "x")]
    tokens, counts = writer.tokens(tuple(Message(role, text) for role, text in said))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    text = "<s>[INST] the dog? [/INST] jumps </s>[INST] why [/INST] x </s>"
    assert tokens.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert theirs.decode(tokens[counts]).split() == ["jumps", "</s>", "x", "</s>"]


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_control_tokens_take_blanks_along_as_in_transformers(side: str, tmp_path: Path) -> None:
    """The blanks were tokens here, which the model had never seen beside such a token."""
    template = TEMPLATE.replace("[INST] ", "\t <s> \n")
    directory = save_tokenizer(tmp_path / "hf", "first", chat_template=template)
    content = json.loads((directory / "tokenizer.json").read_text())
    for added in content["added_tokens"]:
        added[side] = added["content"] == "<s>"
    (directory / "tokenizer.json").write_text(json.dumps(content))
    writer = ChatWriter(read_chat_form(directory), read_tokenizer_json(directory))
    said = [("user", "the dog?"), ("assistant", "jumps"), ("user", "why"), ("assistant", "x")]
    tokens, _ = writer.tokens(tuple(Message(role, text) for role, text in said))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    text = "<s>\t <s> \nthe dog? [/INST] jumps </s>\t <s> \nwhy [/INST] x </s>"
    assert tokens.tolist() == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_so_they_do_where_an_answer_begins_or_ends(side: str, tmp_path: Path) -> None:
    """The texts before an answer and of it were looked at one by one: a blank with which the answer
    begins stayed, and so did one behind it, before the next control token."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>' + m.content + '</s>' }}"
        "{% else %}{{ ' ' + m.content + '\n' }}{% endif %}{% endfor %}"
    )
    directory = save_tokenizer(tmp_path / "hf", "first", chat_template=template)
    content = json.loads((directory / "tokenizer.json").read_text())
    for added in content["added_tokens"]:
        added[side] = True
    (directory / "tokenizer.json").write_text(json.dumps(content))
    writer = ChatWriter(read_chat_form(directory), read_tokenizer_json(directory))
    said = [("user", "the dog?"), ("assistant", " jumps"), ("user", "why"), ("assistant", "x")]
    messages = tuple(Message(role, text) for role, text in said)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    text = "<s>the dog?</s>  jumps\n<s>why</s> x\n"
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    tokens, counts = writer.tokens(messages)
    assert tokens.tolist() == expected
    assert theirs.decode(tokens[counts]).split() == ["jumps", "x"]
    *_, (last, _) = writer.each_answer(messages)
    assert last.tolist() == expected


def spoilt(**changes: Any) -> dict[str, Any]:
    content = llamas_tokenizer()
    model = changes.pop("model", {})
    return {**content, **changes, "model": {**content["model"], **model}}


def without_a_byte() -> dict[str, Any]:
    content = llamas_tokenizer()
    token = content["model"]["vocab"].pop("<0x41>")
    content["model"]["vocab"]["else"] = token
    return content


@pytest.mark.parametrize(
    "content, cause",
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "of kind Unigram, and only BPE"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "of kind WordPiece, and only BPE"),
        (without_a_byte(), "no token for 1 of the 256 bytes"),
        (spoilt(normalizer={"type": "Lowercase"}), "not a tokenizer like Llama's"),
        (spoilt(normalizer=None), "writes spaces in a way"),
        (spoilt(pre_tokenizer={"type": "Whitespace"}), "not a tokenizer like Llama's"),
        (spoilt(decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}]}), "makes text of"),
        (spoilt(decoder=None), "not a tokenizer like Llama's"),
        (spoilt(model={"merges": [["the", "\u6a21"]]}), "outside its vocabulary"),
        (spoilt(model={"ignore_merges": True}), "not a tokenizer like Llama's"),
        (spoilt(model={"dropout": 0.1}), "not a tokenizer like Llama's"),
    ],
)
def test_what_is_unlike_is_refused(content: dict[str, Any], cause: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=cause) as caught:
        read_tokenizer_json(tmp_path)
    assert "BPE like that of GPT-2, SmolLM, Llama or Qwen" in str(caught.value.fixes)
    if "added_tokens" in content:
        plain = {**content, "added_tokens": [], "post_processor": None}
        with pytest.raises(PeerFault):
            tokenizer_from_bytes(json.dumps(plain).encode())


def test_it_goes_out_as_it_came(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "hf")
    (directory / "tokenizer.model").write_bytes(b"for programs that want it")
    size = read_tokenizer_json(directory).vocabulary
    make_model("llama", vocab_size=size + 9).save_pretrained(directory)
    import_hugging_face(directory, tmp_path / "new", "", TRAINING)
    export_hugging_face(tmp_path / "new", tmp_path / "out", None)
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
        assert (tmp_path / "out" / name).read_bytes() == (directory / name).read_bytes()
    known = read_tokenizer_json(directory)
    (directory / "tokenizer.json").unlink()
    told: list[str] = []
    import_hugging_face(directory, tmp_path / "bare", "", TRAINING, tell=told.append)
    assert "AutoTokenizer.from_pretrained" in " ".join(told)
    # and without those files, what a run itself knows of it
    (tmp_path / "plain.json").write_bytes(known.to_bytes())
    plain = Tokenizers.from_file(str(tmp_path / "plain.json"))
    for text in TEXTS:
        assert plain.encode(text).ids == known.encode(text).tolist()


def pieces_by_score(text: str, said: dict[str, Any]) -> list[int]:
    """As llama.cpp's tokenizer "llama" does it. The pair that makes the best piece comes first, of
    several the leftmost. What is then no piece becomes bytes."""
    tokens = {piece: number for number, piece in enumerate(said["tokenizer.ggml.tokens"])}
    scores = said["tokenizer.ggml.scores"]
    if said["tokenizer.ggml.add_space_prefix"] and text:
        text = " " + text
    symbols: list[str | None] = list(text.replace(" ", "\u2581"))
    after = [*range(1, len(symbols)), -1]
    before = [-1, *range(len(symbols) - 1)]
    queue: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right >= 0:
            piece = f"{symbols[left]}{symbols[right]}"
            if piece in tokens:
                heapq.heappush(queue, (-scores[tokens[piece]], left, right, piece))

    for place in range(len(symbols) - 1):
        offer(place, place + 1)
    while queue:
        _, left, right, piece = heapq.heappop(queue)
        if symbols[left] is None or symbols[right] is None:
            continue
        if f"{symbols[left]}{symbols[right]}" != piece:
            continue
        symbols[left], symbols[right] = piece, None
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    found = []
    for symbol in symbols:
        if symbol in tokens:
            found.append(tokens[symbol])
        elif symbol is not None:
            found += [tokens[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def test_one_file_for_llama_cpp_splits_texts_alike(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "hf", chat_template=TEMPLATE)
    tokenizer = read_tokenizer_json(directory)
    size = tokenizer.vocabulary
    make_model("llama", vocab_size=size + 9, eos_token_id=2, bos_token_id=1).save_pretrained(
        directory
    )
    import_hugging_face(directory, tmp_path / "new", "", TRAINING)
    export_gguf(tmp_path / "new", tmp_path / "model.gguf", None)
    fields = GGUFReader(tmp_path / "model.gguf").fields
    said = {name: field.contents() for name, field in fields.items()}
    assert said["tokenizer.ggml.model"] == "llama"
    types = said["tokenizer.ggml.token_type"]
    assert types[:3] == [2, 3, 3] and types[3:259] == [6] * 256 and types[size:] == [5] * 9
    assert set(types[259:size]) == {1}
    named = [said[f"tokenizer.ggml.{name}_token_id"] for name in ("unknown", "bos", "eos")]
    assert named == [0, 1, 2] and said["tokenizer.ggml.add_bos_token"]
    assert said["tokenizer.chat_template"] == TEMPLATE
    for text in [*TEXTS, *fuzzed(300)]:
        assert pieces_by_score(text, said) == tokenizer.encode(text).tolist(), text


def test_merges_that_scores_cannot_say_are_refused(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "hf")
    content = llamas_tokenizer()
    merges = content["model"]["merges"]
    by_piece: dict[str, list[str]] = {}
    for merge in merges:
        by_piece.setdefault(merge.replace(" ", ""), []).append(merge)
    double = next(pairs for pairs in by_piece.values() if len(pairs) > 1)
    size = len(content["model"]["vocab"])
    make_model("llama", vocab_size=size).save_pretrained(directory)
    for number, left in enumerate(
        ([m for m in merges if m != double[0]], [*(m for m in merges if m != double[0]), double[0]])
    ):
        content["model"]["merges"] = left
        (directory / "tokenizer.json").write_text(json.dumps(content))
        import_hugging_face(directory, tmp_path / f"new{number}", "", TRAINING)
        with pytest.raises(UserError, match=r"llama\.cpp would split texts into other tokens"):
            export_gguf(tmp_path / f"new{number}", tmp_path / "model.gguf", None)

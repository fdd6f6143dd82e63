"""Conversations as data: what counts, how they are packed, what a template may reach."""

import gzip
import importlib
import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from data_examples import make_spec

from p2p_dtfm.cli.commands.offline.conversations import prepare_conversations
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import AuditSpec, RunSpec
from p2p_dtfm.core.protocol.sections.data_spec import DataSpec
from p2p_dtfm.train.data.blob_store import BlobStore
from p2p_dtfm.train.data.chat import template as templates
from p2p_dtfm.train.data.chat.conversations import (
    Exchange,
    Message,
    RowsLeftOut,
    conversation_files,
    read_conversations,
)
from p2p_dtfm.train.data.chat.prepare_chat import ChatTotals, prepare_chat
from p2p_dtfm.train.data.chat.template import ChatForm, ChatWriter, read_chat_form
from p2p_dtfm.train.data.dataset import UNCOUNTED, Dataset
from p2p_dtfm.train.data.manifest import load_manifest, parse_manifest
from p2p_dtfm.train.data.prepare import notes_of
from p2p_dtfm.train.data.tokenizer import ByteTokenizer, ending_with
from p2p_dtfm.train.hugging_face.tokenizer_json import (
    read_tokenizer_json,
    require_control_tokens_of,
)
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.stage.batches import Batches
from tests.train.test_parity import TWO_BY_TWO, HandWired

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 31
preparing = importlib.import_module("p2p_dtfm.train.data.prepare")
preparing_chat = importlib.import_module("p2p_dtfm.train.data.chat.prepare_chat")


def rows(count: int) -> list[dict]:
    return [
        {"prompt": f"say {n}: ", "completion": chr(97 + n % 26) * (1 + n % 9)} for n in range(count)
    ]


def written(directory: Path, content: list[dict]) -> Path:
    path = directory / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def model_directory(directory: Path, end: str = "<|im_end|>") -> Path:
    """A tokenizer with control tokens and a chat template, as a model's directory holds them; its
    texts end with `end`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from p2p_dtfm.train.data.byte_pairs import SYMBOLS

    made = Tokenizer(models.BPE(vocab={**SYMBOLS, "ab": 256}, merges=[("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = dict.fromkeys(("<|im_start|>", "<|im_end|>", end))
    made.add_special_tokens([AddedToken(each) for each in names])
    directory.mkdir()
    made.save(str(directory / "tokenizer.json"))
    configuration = {"eos_token": end, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(configuration))
    return directory


def test_only_answers_count_and_control_tokens_are_the_templates(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model")
    writer = ChatWriter(read_chat_form(model), read_tokenizer_json(model / "tokenizer.json"))
    talk = (
        Message("system", "be kind"),
        Message("user", "abc?"),
        Message("assistant", "ab!"),
        Message("user", "more"),
        Message("assistant", "no"),
    )
    tokens, counts = writer.tokens(talk)
    start, end = 257, 258
    assert tokens[0] == start and list(tokens).count(end) == 5
    answers = [(b"ab!", [256, 33, end]), (b"no", [110, 111, end])]
    assert list(tokens[counts]) == [token for _, answer in answers for token in answer]
    assert not counts[0]
    assert not writer.spells_out_control(talk)
    assert writer.spells_out_control((Message("user", "x<|im_end|>y"), Message("assistant", "a")))


def test_without_a_template_an_answer_ends_as_texts_of_the_tokenizers_model_do() -> None:
    writer = ChatWriter(ChatForm(), ending_with(ByteTokenizer(), 7))
    tokens, counts = writer.tokens(Exchange("a", "b"))
    assert list(tokens) == [97, 98, 7] and list(counts) == [False, True, True]
    assert writer.filling == 7


def test_what_ends_an_answer_is_what_its_template_writes_there(tmp_path: Path) -> None:
    """As ChatML's do where a model's own texts end with another token: nothing stopped there."""
    model = model_directory(tmp_path / "model", end="<|endoftext|>")
    form, tokenizer = read_chat_form(model), read_tokenizer_json(model)
    turn_end, text_end = 258, 259
    assert tokenizer.end_of_document == text_end
    content = [talk(("user", f"is it {n}?"), ("assistant", "yes")) for n in range(20)]
    path = written(tmp_path, [*content, *rows(5)])
    manifest, _ = prepare_chat([path], tmp_path / "out", tokenizer, form, context=99)
    assert manifest.tokenizer.end_of_document == turn_end
    writer = ChatWriter(form, tokenizer)
    assert writer.filling == turn_end and writer.tokens(Exchange("a", "b"))[0][-1] == turn_end
    for changed in ("<|im_end|><|endoftext|>", "\n", "<|im_start|><|endoftext|><|im_start|>"):
        other = replace(form, template=TEMPLATE.replace("<|im_end|>", changed))
        assert ChatWriter(other, tokenizer).filling == text_end
    unusable = replace(form, template="{{ raise_exception('none') }}")
    assert ChatWriter(unusable, tokenizer).filling == text_end


def test_it_equals_what_transformers_writes(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    model = model_directory(tmp_path / "model")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    theirs.chat_template = TEMPLATE
    talk = [{"role": "user", "content": "abc?"}, {"role": "assistant", "content": "ab ü!"}]
    expected = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    writer = ChatWriter(read_chat_form(model), read_tokenizer_json(model / "tokenizer.json"))
    tokens, counts = writer.tokens(tuple(Message(**each) for each in talk))
    assert list(tokens) == list(expected["input_ids"])
    assert set(np.flatnonzero(expected["assistant_masks"])) <= set(np.flatnonzero(counts))


def test_a_template_that_lies_alone_is_written_with_the_named_tokenizers_tokens(
    tmp_path: Path,
) -> None:
    """Its control tokens became pieces of text, and a text ended with each `>`."""
    model, alone = model_directory(tmp_path / "model"), tmp_path / "alone"
    alone.mkdir()
    shutil.copy(model / "tokenizer_config.json", alone)
    (imported := tmp_path / "imported").mkdir()
    (imported / "tokenizer.json").write_bytes(read_tokenizer_json(model).to_bytes())
    shutil.copytree(model, imported / "origin")
    path = written(tmp_path, [talk(("user", f"{n}?"), ("assistant", "yes")) for n in range(20)])
    digests = set()
    for number, (chat, tokenizer) in enumerate(
        [(model, None), (alone, model), (alone, imported), (alone, imported / "tokenizer.json")]
    ):
        out = tmp_path / f"out-{number}"
        prepare_conversations([path], out, tokenizer, chat, 0.1, 99, ("", "", ""))
        digests.add(load_manifest(out / "manifest.json").digest())
    assert len(digests) == 1


def test_a_name_that_is_no_token_ends_nothing() -> None:
    form = ChatForm(names={"eos_token": "<|end|>"})
    assert ChatWriter(form, ByteTokenizer()).filling == 0
    assert list(ChatWriter(form, ByteTokenizer()).tokens(Exchange("a", "b"))[0]) == [97, 98, 0]


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_a_template_sees_that_there_are_none(name: str) -> None:
    """Undefined is not none: the answers were learnt behind a list of tools."""
    asks = f"{{% if {name} is not none %}}<{name}>{{% endif %}}"
    writer = ChatWriter(ChatForm(asks + THINKS), ByteTokenizer())
    tokens, _ = writer.tokens((Message("user", "a"), Message("assistant", "b")))
    assert bytes(map(int, tokens)).decode() == "<user>a\n<assistant><think></think>b\n"


def dataset_of(directory: Path, content: list[dict]) -> Dataset:
    manifest, _ = prepare_chat(
        [written(directory, content)],
        directory / "out",
        ByteTokenizer(),
        ChatForm(),
        context=CONTEXT,
        held_out_fraction=0.2,
    )
    assert parse_manifest(manifest.to_bytes()) == manifest
    return Dataset(manifest, BlobStore(directory / "out" / "blobs").path, CONTEXT)


def test_each_conversation_is_whole_in_one_sequence_and_its_answer_counts(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, rows(200))
    spec = make_spec(context=CONTEXT)
    seen, counted = [], 0
    for index in range(dataset.sample_count):
        inputs, targets = dataset._read(dataset._train, (index,))
        sequence = bytes([*map(int, inputs[0]), 0]).decode()
        learnt = targets[0] != UNCOUNTED
        assert learnt.sum() == dataset._train.counted(index)
        answers = "".join(f"{row.split(': ')[1]}\0" for row in sequence.split("\0") if ": " in row)
        text = bytes(map(int, targets[0][learnt])).decode()
        assert text == answers
        seen += [row for row in sequence.split("\0") if row]
        counted += int(learnt.sum())
    expected = {row["prompt"] + row["completion"] for row in rows(200)}
    assert set(seen) <= expected and len(seen) == len(set(seen)) > 100
    steps = {dataset.counted(spec, step) for step in range(5)}
    assert len(steps) > 1 and all(0 < count < spec.tokens_per_step for count in steps)


def test_stages_train_on_answers_as_one_machine_does(tmp_path: Path) -> None:
    """The mean is over the tokens that count, of which unlike microbatches have unlike many."""
    torch.set_num_threads(1)
    dataset = dataset_of(tmp_path, rows(200))
    spec = make_spec(context=CONTEXT, global_batch=8, microbatch=2)
    model = spec.model.model_copy(update={"layers": 3, "width": 16, "heads": 2})
    spec = spec.model_copy(update={"model": model})
    assert layer_count(spec) == 5
    batches = Batches(dataset, spec)
    reference = ReferenceRun(spec, batches, weight=batches.weight)
    expected = list(reference.losses(6))
    wired = Weighed(spec, batches)
    assert max(abs(wired.step(n) - expected[n]) for n in range(6)) < 1e-5
    inputs, targets = zip(*(batches(0, n) for n in range(4)), strict=True)
    first = ReferenceRun(spec, batches)
    logits = first.model(torch.cat(inputs))
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.cat(targets).flatten())
    assert abs(mean.item() - expected[0]) < 1e-5


def test_an_evaluation_counts_its_sequences_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each microbatch had all of them counted: of 4,096 that took half a minute."""
    dataset = dataset_of(tmp_path, rows(200))
    spec = make_spec(context=CONTEXT, global_batch=8, microbatch=2)
    batches, plain, counts = Batches(dataset, spec), dataset.held_out_counted, []

    def counted(spec: RunSpec) -> int:
        counts.append(spec)
        return plain(spec)

    monkeypatch.setattr(dataset, "held_out_counted", counted)
    first = spec.microbatches_per_step
    held_out = range(first, first + spec.evaluation_microbatches)
    weights = {batches.weight(step, n) for step in (0, 10) for n in held_out}
    assert weights == {spec.evaluation.sequences * CONTEXT / plain(spec)}
    assert len(held_out) > 1 and len(counts) == 1


class Weighed(HandWired):
    def __init__(self, spec, batches: Batches) -> None:
        super().__init__(spec, TWO_BY_TWO, batches, recompute=False)
        self._at = 0
        for runner in self.runners.values():
            runner.forward = self._weighing(runner, runner.forward)

    def _weighing(self, runner, forward):
        def weighed(microbatch, *rest, **named):
            result = forward(microbatch, *rest, **named)
            if not runner.has_head:
                return result
            weight = self.batch.weight(self._at, microbatch)
            runner.weigh(microbatch, weight)
            return result * weight

        return weighed

    def step(self, step: int) -> float:
        self._at = step
        return super().step(step)


@pytest.mark.parametrize("form", ["jsonl.gz", "parquet", "arrow", "share"])
def test_the_same_rows_are_read_in_every_form(form: str, tmp_path: Path) -> None:
    turns = [(("user", f"{n}?"), ("assistant", "yes" * (1 + n % 3))) for n in range(30)]
    content = [talk(*each) for each in turns]
    plain = written(tmp_path, content)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "notes.txt").write_text("no rows")
    table = pyarrow.Table.from_pylist([{"id": 3, **each} for each in content])
    if form == "jsonl.gz":
        (folder / "rows.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    elif form == "parquet":
        pyarrow.parquet.write_table(table, folder / "rows.parquet")
    elif form == "arrow":
        with pyarrow.ipc.new_stream(folder / "rows.arrow", table.schema) as writer:
            writer.write_table(table)
    else:
        names = {"user": "human", "assistant": "gpt"}
        rows = [
            {"conversations": [{"from": names[role], "value": text} for role, text in each]}
            for each in turns
        ]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = conversation_files([folder], tmp_path / "out")
    assert [path.parent for path in files] == [folder]
    left_out = RowsLeftOut()
    found = [each for each, _, _ in read_conversations(files, left_out)]
    assert found == [each for each, _, _ in read_conversations([plain], left_out)]
    assert len(found) == 30 and str(left_out) == "nothing"
    (folder / "rows").mkdir()
    with pytest.raises(UserError, match="no files of conversations in"):
        conversation_files([folder / "rows"], tmp_path / "out")


def test_a_table_whose_texts_are_none_is_named(tmp_path: Path) -> None:
    bytes_for_text = pyarrow.array([b"say \xff"], type=pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"prompt": bytes_for_text, "completion": ["that"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="is not a whole Parquet file"):
        list(read_conversations([tmp_path / "a.parquet"], RowsLeftOut()))


def test_what_cannot_be_used_is_left_out_and_counted(tmp_path: Path) -> None:
    content = [
        *rows(40),
        {"prompt": "p" * 100, "completion": "too far"},
        {"prompt": "a", "completion": "b" * 100},
        {"prompt": "a", "completion": ""},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"text": "no conversation"},
        {"prompt": "a\0", "completion": "b"},
    ]
    _, totals = prepare_chat(
        [written(tmp_path, content)], tmp_path / "out", ByteTokenizer(), ChatForm(), context=CONTEXT
    )
    left_out = totals.left_out
    assert (left_out.too_long, left_out.shortened, left_out.without_answer) == (1, 2, 2)
    assert (left_out.unreadable, left_out.with_control_tokens) == (1, 1)
    assert totals.conversations == 41


def test_equal_conversations_are_on_one_side_with_and_without_a_last_newline(
    tmp_path: Path,
) -> None:
    numbered = [{"id": number, **rows(1)[0]} for number in range(15)]
    path = written(tmp_path, [*[rows(1)[0]] * 15, *numbered])
    path.write_bytes(path.read_bytes().rstrip())
    with pytest.raises(UserError, match="no conversations to train on"):
        prepare_chat([path], tmp_path / "out", ByteTokenizer(), ChatForm(), context=CONTEXT)
    path.write_text(json.dumps([rows(1)[0]] * 30, indent=1))
    with pytest.raises(UserError, match="no conversations in") as caught:
        prepare_chat([path], tmp_path / "out", ByteTokenizer(), ChatForm(), context=CONTEXT)
    assert "jq -c '.[]'" in caught.value.fixes[1]


def test_control_tokens_that_the_tokenizer_has_not_are_refused(tmp_path: Path) -> None:
    """They came into the shards as other tokens, which every member then refused."""
    form = read_chat_form(model_directory(tmp_path / "model"))
    assert max(form.special.values()) == 258
    with pytest.raises(UserError, match=r"is token 25\d, and the tokenizer has 256"):
        prepare_chat(
            [written(tmp_path, rows(40))],
            tmp_path / "out",
            ByteTokenizer(),
            form,
            context=CONTEXT,
        )


def test_control_tokens_that_are_others_of_the_tokenizer_are_refused(tmp_path: Path) -> None:
    """Their numbers were there, and turns began and ended with plain pieces of text."""
    model = model_directory(tmp_path / "model")
    named = read_chat_form(model).special
    theirs = json.loads((model / "tokenizer.json").read_text())
    other = tmp_path / "other" / "tokenizer.json"
    other.parent.mkdir()
    for each in theirs["added_tokens"]:
        each["content"] = f"piece {each['id']}"
    other.write_text(json.dumps(theirs))
    with pytest.raises(UserError, match=r"is token 25\d, and in .* that is 'piece 25\d'"):
        require_control_tokens_of(other, model, named)
    require_control_tokens_of(model, model, named)
    plain = tmp_path / "plain.json"
    plain.write_bytes(read_tokenizer_json(model).to_bytes())
    require_control_tokens_of(plain, model, named)


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer_config.json", '{"chat_template": [1, {"name": []}, "name"]}'),
        ("tokenizer_config.json", '{"chat_template": "\\ud800"}'),
        ("tokenizer.json", '{"added_tokens": 5}'),
    ],
)
def test_files_of_a_model_that_are_not_as_they_should_be(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    assert read_chat_form(tmp_path).special == {}


STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    "{{ strftime_now('%Y') }}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def talk(*turns: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def chat(directory: Path, content: list[dict], template: str) -> ChatTotals:
    directory.mkdir(exist_ok=True)
    path = written(directory, content)
    form = ChatForm(template)
    return prepare_chat([path], directory / "out", ByteTokenizer(), form, context=99)[1]


def test_a_row_that_the_template_refuses_is_counted_and_the_others_stay(tmp_path: Path) -> None:
    good = [talk(("user", f"is it {n}?"), ("assistant", "yes")) for n in range(9)]
    bad = [talk(("assistant", "hello")), talk(("system", "be kind"), ("assistant", "no"))]
    totals = chat(tmp_path, [bad[0], *good, bad[1]], STRICT)
    assert (totals.conversations, totals.left_out.refused) == (9, 2)
    said = str(totals.left_out)
    assert "2 rows refused by the chat template" in said
    assert "line 1: begins with an answer" in said and "line 11: begin with the" in said
    with pytest.raises(UserError, match=r"refuses every row .*begin with the user"):
        chat(tmp_path, bad, STRICT)


THINKS = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if loop.last and message.role == 'assistant' %}<think></think>{% endif %}"
    "{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As Qwen3's: thoughts stand in the last answer alone."""


def test_a_template_that_writes_the_last_answer_otherwise_makes_a_sequence_of_each(
    tmp_path: Path,
) -> None:
    several = talk(("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d"))
    one = [talk(("user", f"{n}?"), ("assistant", "yes")) for n in range(5)]
    writer = ChatWriter(ChatForm(THINKS), ByteTokenizer())
    conversation = tuple(Message(**turn) for turn in several["messages"])
    rows = list(writer.each_answer(conversation))
    assert [bytes(map(int, tokens)).decode() for tokens, _ in rows] == [
        "<user>a?\n<assistant><think></think>b\n",
        "<user>a?\n<assistant>b\n<user>c?\n<assistant><think></think>d\n",
    ]
    assert [bytes(map(int, tokens[counts])).decode() for tokens, counts in rows] == [
        "<think></think>b\n",
        "<think></think>d\n",
    ]
    totals = chat(tmp_path, [several, *one], THINKS)
    assert (totals.conversations, totals.taken_apart) == (6, 1)
    other = "{{ messages|length }}{% if add_generation_prompt %}?{% endif %}"
    with pytest.raises(UserError, match=r"refuses every row .*does not begin with what asks"):
        chat(tmp_path / "other", one, other)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{% for n in range(999999999) %}x{% endfor %}",
        "{{ raise_exception('no such role') }}",
        "{{ messages[0].content * 300000000 }}",
        "{{ 9 ** 99999999 }}",
        "{{ 1 / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% if %}",
    ],
)
def test_a_template_reaches_nothing(template: str) -> None:
    with pytest.raises(UserError, match="cannot be used"):
        writer = ChatWriter(ChatForm(template=template), ByteTokenizer())
        writer.tokens((Message("user", "a"), Message("assistant", "b")))


# Four gigabytes: more than what tests before have left free in the heap, which is not bounded.
DOUBLED = (
    "{% set kept = namespace(text='xxxxxxxxxxxxxxxx') %}{% for n in range(28) %}"
    "{% set kept.text = kept.text ~ kept.text %}{% endfor %}{{ kept.text|length }}"
)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ('%4000000000d' % 1)|length }}",
        "{{ '{:4000000000}'.format(1)|length }}",
        "{{ messages[0].content.ljust(4000000000)|length }}",
        "{{ messages[0].content|center(4000000000)|length }}",
        "{{ messages[0].content|indent(4000000000, true)|length }}",
        DOUBLED,
    ],
)
def test_a_template_takes_so_much_memory_and_no_more(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes a number, and would take a machine's whole memory for it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(templates, "MEMORY_LIMIT_BYTES", 32 << 20)
    with pytest.raises(UserError, match="memory"):
        writer = ChatWriter(ChatForm(template=template), ByteTokenizer())
        writer.tokens((Message("user", "a"), Message("assistant", "b")))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_runs_of_spaces_are_nobodys_control_tokens() -> None:
    special = {"<|end|>": 300, "  ": 301}
    form = ChatForm(special=special, plain=frozenset({"  "}), names={"eos_token": "<|end|>"})
    writer = ChatWriter(form, ByteTokenizer())
    assert not writer.spells_out_control(Exchange("a  b", "c"))
    assert writer.spells_out_control(Exchange("a<|end|>b", "c"))
    tokens, _ = writer.tokens(Exchange("a  b", "c"))
    assert 301 in tokens, "the tokenizer's own token for them"


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"audit": AuditSpec(rate=0.5)}, "audit.rate"),
        ({"data": DataSpec(packing="documents", end_of_document=0)}, "data.packing"),
    ],
)
def test_what_does_not_know_conversations_is_refused(
    changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    spec = make_spec(context=CONTEXT).model_copy(update=changes)
    with pytest.raises(UserError, match=f"{name}.* does not know conversations"):
        dataset_of(tmp_path, rows(40)).require_fits(spec)


def test_more_sequences_than_a_manifest_counts_are_refused_before_all_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last word, after all was written, was to make shards larger, which is no option."""
    for module in (preparing, preparing_chat):
        monkeypatch.setattr(module, "MANIFEST_LIMIT_BYTES", 1000)
    with pytest.raises(UserError, match="sequences or more") as refused:
        dataset_of(tmp_path, rows(4000))
    assert "--context" in refused.value.fixes[0]
    assert int(refused.value.cause.split()[0].replace(",", "")) < 1000, "of some 2,000"


def test_a_context_of_nothing_and_too_long_notes_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, rows(4))
    with pytest.raises(UserError, match="context of -1"):
        prepare_chat([path], tmp_path / "out", ByteTokenizer(), ChatForm(), context=-1)
    with pytest.raises(UserError, match="longer than 2000 bytes"):
        notes_of("n" * 3000, "", "")


def test_another_context_than_it_was_prepared_for_is_refused(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, rows(40))
    with pytest.raises(UserError, match="sequences of 31 tokens"):
        Dataset(dataset.manifest, lambda digest: None, 16)

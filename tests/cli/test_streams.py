"""`atlas-hf train` on documents read while training goes on, and on data sets by their names."""

import json
from collections import Counter
from itertools import islice

import datasets
import pyarrow
import pytest
import torch
from safetensors.torch import load_file

from atlas_hf.training import trainer as trainer_module
from atlas_hf.training.errors import InputError
from atlas_hf.training.streams import DocumentStream, StreamedBlocks, open_stream
from atlas_hf.training.tokenizer import load_tokenizer


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


class OnePass(StreamedBlocks):
    """Ends where blocks would come again."""

    number = 0

    def __iter__(self):
        return self.one_pass(self.number)


@pytest.mark.parametrize("num_files", [1, 2])
def test_loading_in_workers_reads_every_document_once(trained, documents, tmp_path, num_files):
    paths = []
    for i in range(num_files):
        paths.append(tmp_path / f"{i}.jsonl")
        datasets.Dataset.from_dict({"text": documents[i::num_files]}).to_json(paths[-1])
    rows = open_stream(paths, None, None, "text", hold_out=False).train
    tokenizer = load_tokenizer(trained)
    # Blocks of one token: nothing is left over at the end of a worker's part.
    blocks = OnePass(rows, tokenizer, 1, packed=False, seed=0)
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(blocks, batch_size=1, num_workers=workers)
        ids = [int(batch["input_ids"]) for batch in loader]
        assert len(ids) == sum(len(tokenizer(text)["input_ids"]) + 1 for text in documents)
        assert ids.count(tokenizer.eos_token_id) == len(documents)


@pytest.fixture
def documents():
    return [f"A story of {i} days and {i * 7} nights, told at the inn." for i in range(120)]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "folder by name"])
def test_streams(from_yaml, documents, tmp_path, kind, capsys):
    rows = datasets.Dataset.from_dict({"body": documents})
    changes = {"text_column": "body", "stream": True, "pack": True}
    (tmp_path / "data").mkdir()
    if kind == "txt":
        for i in range(0, 120, 4):
            (tmp_path / "data" / f"{i}.txt").write_text("\n".join(documents[i : i + 4]))
        changes["texts"] = sorted(map(str, (tmp_path / "data").iterdir()))
    elif kind == "jsonl":
        rows.to_json(tmp_path / "data" / "rows.jsonl")
        changes["texts"] = [str(tmp_path / "data" / "rows.jsonl")]
    else:
        rows.to_parquet(tmp_path / "data" / "train.parquet")
        changes["texts"] = [str(tmp_path / "data" / "train.parquet")]
        if kind == "folder by name":
            changes |= {"texts": None, "dataset": str(tmp_path / "data")}
    outcome = from_yaml(output=str(tmp_path / "out"), **changes)
    assert outcome.code == 0, outcome.err
    assert "a stream" in outcome.out
    assert [step for step, _ in json.loads((tmp_path / "out" / "run.json").read_text())["losses"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "holds no documents"),
        ('{"text": " "}', "holds no text"),
        ('{"text": "one"}\n{"text": ', "JSON parse error: Invalid value. in row 1"),
    ],
)
def test_folders_of_data_that_cannot_be_read(from_yaml, tmp_path, content, part, stream):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text(content)
    outcome = from_yaml(dataset=str(tmp_path / "data"), output=str(tmp_path / "out"), stream=stream)
    assert outcome.code == 2
    assert str(tmp_path / "data") in outcome.err
    assert part in outcome.err


def test_a_stream_without_text(from_yaml, text_file, tmp_path):
    """More rows than are looked at before."""
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n' * 20)
    fields = {"texts": [str(tmp_path / "rows.jsonl")], "held_out": [str(text_file)]}
    outcome = from_yaml(output=str(tmp_path / "out"), stream=True, **fields)
    assert outcome.code == 2
    assert "the stream holds no text to train on" in outcome.err


def test_a_split_that_nobody_asked_for_is_not_opened(documents, tmp_path):
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict({"text": documents}).to_json(tmp_path / "data" / "train.jsonl")
    (tmp_path / "data" / "test.jsonl").write_text('{"text": ""}\n')
    stream = open_stream([], str(tmp_path / "data"), None, "text", hold_out=False)
    assert stream.sample() == documents
    with pytest.raises(InputError, match=r"the split test of .*data holds no text"):
        open_stream([], str(tmp_path / "data"), None, "text", hold_out=True)


def test_a_stream_of_texts_of_two_types(documents, tmp_path):
    datasets.Dataset.from_dict({"text": documents[:60]}).to_json(tmp_path / "rows.jsonl")
    large = datasets.Features({"text": datasets.Value("large_string")})
    datasets.Dataset.from_dict({"text": documents[60:]}, features=large).to_parquet(tmp_path / "rows.parquet")
    stream = open_stream([tmp_path / "rows.jsonl", tmp_path / "rows.parquet"], None, None, "text", hold_out=False)
    assert stream.sample() == documents


def test_a_stream_that_breaks_off_says_so(trained):
    def rows():
        yield {"text": "one"}
        raise pyarrow.ArrowInvalid("JSON parse error")

    broken = datasets.IterableDataset.from_generator(rows)
    with pytest.raises(InputError, match="the stream cannot be read to its end: JSON parse error"):
        DocumentStream(broken, broken).sample()
    with pytest.raises(InputError, match="the stream cannot be read to its end: JSON parse error"):
        list(StreamedBlocks(broken, load_tokenizer(trained), 1, packed=False, seed=0))


@pytest.mark.parametrize(
    ("num_documents", "cut_at", "fields"),
    [
        (120, 3, {"save_steps": 2, "max_steps": 5}),
        # Some four steps a pass: in a later one
        (10, 11, {"save_steps": 5, "max_steps": 12, "batch_size": 4, "seed": 3}),
    ],
)
def test_a_stream_resumes_to_the_same_weights(
    from_yaml, documents, tmp_path, monkeypatch, num_documents, cut_at, fields
):
    datasets.Dataset.from_dict({"text": documents[:num_documents]}).to_json(tmp_path / "rows.jsonl")
    (tmp_path / "held_out.txt").write_text(" ".join(documents[10:20]))
    changes = {"texts": [str(tmp_path / "rows.jsonl")], "held_out": [str(tmp_path / "held_out.txt")], "stream": True}
    assert from_yaml(output=str(tmp_path / "whole"), **changes, **fields).code == 0

    class Interrupted(trainer_module.Trainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == cut_at:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "Trainer", Interrupted)
        assert from_yaml(output=str(tmp_path / "cut"), **changes, **fields).code == 130
    assert from_yaml("--resume", output=str(tmp_path / "cut"), **changes, **fields).code == 0
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-6, atol=1e-7)


def test_a_stream_passes_over_its_documents_in_another_order_each_time(trained, documents, tmp_path):
    datasets.Dataset.from_dict({"text": documents[:20]}).to_json(tmp_path / "rows.jsonl")
    rows = open_stream([tmp_path / "rows.jsonl"], None, None, "text", hold_out=False).train
    tokenizer = load_tokenizer(trained)
    blocks = StreamedBlocks(rows, tokenizer, 1, packed=False, seed=0)
    size = sum(len(tokenizer(text)["input_ids"]) + 1 for text in documents[:20])
    ids = [int(block["input_ids"]) for block in islice(blocks, 2 * size)]
    assert Counter(ids[:size]) == Counter(ids[size:])
    assert ids[:size] != ids[size:]
    # Nothing to pass over ends the passes
    assert list(StreamedBlocks(rows.filter(lambda row: False), tokenizer, 1, packed=False, seed=0)) == []


def test_documents_of_parquet_and_of_a_named_dataset_in_memory(from_yaml, documents, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    datasets.Dataset.from_dict({"text": documents}).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_dict({"text": documents[:40]}).to_parquet(folder / "validation.parquet")
    outcome = from_yaml(dataset=str(folder), output=str(tmp_path / "a"))
    assert outcome.code == 0, outcome.err
    outcome = from_yaml(
        *(folder / "train.parquet", "--held-out", folder / "validation.parquet"), output=str(tmp_path / "b")
    )
    assert outcome.code == 0, outcome.err
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.parametrize("workers", [0, 2])
def test_no_held_out_document_is_trained_on(trained, documents, tmp_path, workers):
    """Over several passes, whatever order the shards come in."""
    paths = []
    for i, text in enumerate(documents):
        paths.append(tmp_path / f"{i:03}.txt")
        paths[-1].write_text(text)
    stream, tokenizer = open_stream(paths, None, None, "text", hold_out=True), load_tokenizer(trained)
    held_out = stream.held_out_texts()
    assert 0 < len(held_out) < len(documents) / 4
    blocks = OnePass(stream.train, tokenizer, 1, packed=False, seed=0)
    expected = Counter()
    for text in set(documents) - set(held_out):
        expected.update([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    for number in range(2):
        blocks.number = number
        loader = torch.utils.data.DataLoader(blocks, batch_size=1, num_workers=workers)
        assert Counter(int(batch["input_ids"]) for batch in loader) == expected


def test_documents_without_text_are_left_out(tmp_path, trained):
    rows = [{"text": None}] * 2 + [{"text": ""}] * 70 + [{"text": "one"}, {"text": None}, {"text": "two"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream, tokenizer = open_stream([path], None, None, "text", hold_out=False), load_tokenizer(trained)
    assert stream.sample() == ["one", "two"]
    blocks = StreamedBlocks(stream.train, tokenizer, 1, packed=False, seed=0).one_pass(0)
    assert sum(int(block["input_ids"]) == tokenizer.eos_token_id for block in blocks) == 2

"""Reading texts, training tokenizers and cutting blocks."""

import json
import os
import threading

import datasets
import pytest
import torch
from transformers import AutoTokenizer

from atlas_hf.training.errors import InputError
from atlas_hf.training.texts import demo_texts, read_corpus, read_measured
from atlas_hf.training.tokenizer import check_vocabulary, encode, load_tokenizer, to_blocks, train_tokenizer


def test_the_shipped_novels_are_whole():
    train, held_out = demo_texts()
    assert (len(train.encode()), len(held_out.encode())) == (684_768, 466_854)
    assert train.startswith("PRIDE AND PREJUDICE")
    assert held_out.startswith("Persuasion")


def test_files_folders_and_json_give_documents_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n{"text": "fourth"}\n', encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert read_corpus([tmp_path]).train == ["first", "second", "third", "fourth"]
    assert read_corpus([tmp_path / "b.txt", tmp_path / "a.txt"]).train == ["second", "first"]


def test_endings_in_capitals(tmp_path):
    (tmp_path / "A.TXT").write_text("first", encoding="utf-8")
    (tmp_path / "B.JSONL").write_text('{"text": "second"}\n', encoding="utf-8")
    datasets.Dataset.from_dict({"text": ["third"]}).to_parquet(tmp_path / "C.Parquet")
    assert read_corpus([tmp_path]).train == ["first", "second", "third"]
    assert read_corpus([tmp_path / "B.JSONL"]).train == ["second"]


def test_a_pipe_is_a_text(tmp_path):
    """As the shell's `<(zcat story.gz)` is."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("from a pipe",), daemon=True)
    writer.start()
    assert read_corpus([tmp_path / "pipe"]).train == ["from a pipe"]
    writer.join()


def test_another_column_of_a_json_file(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"body": "one"}, {"body": "two"}]), encoding="utf-8")
    assert read_corpus([path], text_column="body").train == ["one", "two"]
    with pytest.raises(InputError, match="no column 'text', only body"):
        read_corpus([path])


def test_saved_datasets_with_and_without_splits(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["one", "", "two"], "label": [0, 1, 2]})
    rows.save_to_disk(tmp_path / "rows")
    assert read_corpus([tmp_path / "rows"]).train == ["one", "two"]
    splits = datasets.DatasetDict({"train": rows, "test": datasets.Dataset.from_dict({"text": ["three"]})})
    splits.save_to_disk(tmp_path / "splits")
    corpus = read_corpus([tmp_path / "splits"])
    assert (corpus.train, corpus.held_out) == (["one", "two"], ["three"])
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "no_train")
    with pytest.raises(InputError, match="no train"):
        read_corpus([tmp_path / "no_train"])
    with pytest.raises(InputError, match="does not hold strings"):
        read_corpus([tmp_path / "rows"], text_column="label")


def test_what_is_held_out_is_measured(tmp_path, capsys):
    def splits(**texts):
        kinds = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in texts.items()}
        return datasets.DatasetDict(kinds)

    (tmp_path / "story.txt").write_text("a story", encoding="utf-8")
    splits(train=["seen"], test=["later"], validation=["unseen"]).save_to_disk(tmp_path / "three")
    splits(test=["later", ""]).save_to_disk(tmp_path / "one")
    paths = [tmp_path / "story.txt", tmp_path / "three", tmp_path / "one"]
    assert read_measured(paths) == ["a story", "unseen", "later"]
    said = f"{paths[1]}: measured on its split validation\n{paths[2]}: measured on its split test\n"
    assert capsys.readouterr().out.endswith(said)
    splits(train=["seen"]).save_to_disk(tmp_path / "other")
    with pytest.raises(InputError, match=f"splits train, none of validation, test .*such as {tmp_path}/other/train"):
        read_measured([tmp_path / "other"])
    assert read_measured([tmp_path / "other" / "train"]) == ["seen"]
    splits(train=["seen"], test=[""]).save_to_disk(tmp_path / "empty")
    with pytest.raises(InputError, match="holds no text in its split test"):
        read_measured([tmp_path / "empty"])


def test_a_tokenizer_keeps_every_byte_and_reloads(tmp_path):
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 20, vocab_size=300)
    text = "the cat\n\t naïve — 猫 \x00 <|endoftext"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (loaded.eos_token, loaded.pad_token, loaded.padding_side) == ("<|endoftext|>", "<|pad|>", "left")
    assert loaded.get_vocab() == load_tokenizer(tmp_path).get_vocab()


def test_a_vocabulary_must_hold_the_bytes():
    assert len(train_tokenizer(["ab"], 258)) == 258
    with pytest.raises(InputError, match="vocab_size=257"):
        train_tokenizer(["ab"], 257)


def test_documents_are_ended_and_cut_into_blocks():
    tokenizer = train_tokenizer(["abc"], 258)
    ids = encode(tokenizer, ["ab", "c"])
    end = tokenizer.eos_token_id
    assert [tokenizer.decode(i) if i != end else "." for i in ids.tolist()] == ["a", "b", ".", "c", "."]
    assert torch.equal(to_blocks(ids, 2, "it"), ids[:4].view(2, 2))
    with pytest.raises(InputError, match="it has 5 tokens, less than one block of 6"):
        to_blocks(ids, 6, "it")


def test_a_vocabulary_that_the_model_lacks_is_refused():
    tokenizer = train_tokenizer(["ab"], 258)
    check_vocabulary(tokenizer, 258)
    check_vocabulary(tokenizer, 320)
    with pytest.raises(InputError, match="258 tokens, but the model's vocab_size is 257"):
        check_vocabulary(tokenizer, 257)

"""Train a model and a tokenizer on texts: files, folders, a saved dataset or one on the Hub.

Everything is written to --output when the run is complete, and nothing before. `torchrun -m atlas_hf.cli train ...` and
`accelerate launch -m atlas_hf.cli train ...` run the same command on several processes.
"""

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from atlas_hf.cli.info import path_of
from atlas_hf.cli.options import (
    add_model_arguments,
    assignment,
    build_config,
    command_name,
    load_model,
    natural,
    path,
    positive_float,
    positive_int,
    seed,
)
from atlas_hf.modeling.dispatch import NO_PATH
from atlas_hf.modeling.modeling_atlas import AtlasForCausalLM
from atlas_hf.training.errors import InputError
from atlas_hf.training.processes import ALONE, Processes, joined_processes
from atlas_hf.training.run import Data, run_training
from atlas_hf.training.staging import check_output, partial_folder
from atlas_hf.training.streams import DocumentStream, StreamedBlocks, load_by_name, open_stream
from atlas_hf.training.texts import HELD_OUT_SPLITS, Corpus, read_corpus, read_measured, texts_of
from atlas_hf.training.tokenizer import (
    check_vocabulary,
    document_positions,
    encode,
    load_tokenizer,
    to_blocks,
    train_tokenizer,
)
from atlas_hf.training.trainer import OPTIMIZERS, TrainingOptions, training_arguments

HELD_OUT_SHARE = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "texts", nargs="*", type=path, help="text, JSON or parquet files, or folders of them or of a saved dataset"
    )
    parser.add_argument("--config", type=path, help="YAML file of these flags' names and values; flags override it")
    parser.add_argument("--output", type=path, help="folder to write model, tokenizer and report to; always needed")
    parser.add_argument("--dataset", metavar="NAME", help="dataset on the Hub, or a folder of data files, by its name")
    parser.add_argument("--subset", metavar="NAME", help="configuration of --dataset")
    parser.add_argument(
        "--stream", action="store_true", help="read documents as training goes on, without holding them in memory"
    )
    parser.add_argument(
        "--pack", action="store_true", help="begin every document with a fresh memory, though many share a block"
    )
    parser.add_argument(
        "--held-out",
        nargs="+",
        type=path,
        default=[],
        help="texts to measure perplexity on (default: the dataset's validation or test split, or else the last twentieth)",
    )
    parser.add_argument("--text-column", default="text", help="column of JSON files and datasets")
    parser.add_argument("--tokenizer", type=path, help="folder of a tokenizer to use (default: train one)")
    parser.add_argument("--vocab-size", type=positive_int, default=2048, help="size of a tokenizer trained here")
    parser.add_argument(
        "--init-from", type=path, help="folder of a model to start from; the model flags are then ignored"
    )
    add_training_arguments(parser)
    parser.add_argument("--save-steps", type=natural, default=0, help="steps between checkpoints (0: none)")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="muon: for matrices, adamw for the rest"
    )
    parser.add_argument("--tensorboard", action="store_true", help="log to OUTPUT/tensorboard")
    parser.add_argument(
        "--trainer",
        type=assignment,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other field of transformers' TrainingArguments, e.g. bf16=true; may be repeated",
    )
    parser.add_argument("--resume", action="store_true", help="go on from an interrupted run's last checkpoint")
    add_model_arguments(parser, defaults={"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4})


def add_training_arguments(
    parser: argparse.ArgumentParser, *, max_steps: int = 500, batch_size: int = 8, lr: float = 2e-3
) -> None:
    """Flags that `train` and `demo` share."""
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier run wrote to --output")
    group = parser.add_argument_group("training")
    group.add_argument("--max-steps", type=positive_int, default=max_steps, help="optimiser steps")
    group.add_argument("--batch-size", type=positive_int, default=batch_size, help="blocks per step")
    group.add_argument("--block-size", type=positive_int, default=256, help="tokens per block")
    group.add_argument("--lr", type=positive_float, default=lr, help="peak learning rate")
    group.add_argument("--seed", type=seed, default=0, help="of weights and of the blocks' order")


def training_options(arguments: argparse.Namespace, save_steps: int = 0) -> TrainingOptions:
    return TrainingOptions(
        max_steps=arguments.max_steps,
        batch_size=arguments.batch_size,
        learning_rate=arguments.lr,
        seed=arguments.seed,
        save_steps=save_steps,
        optimizer=getattr(arguments, "optimizer", "adamw"),
        tensorboard=getattr(arguments, "tensorboard", False),
        extra=dict(getattr(arguments, "trainer", ())),
    )


def new_model(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> AtlasForCausalLM:
    """A model for `tokenizer` as the flags describe it, with weights by --seed."""
    pad = tokenizer.pad_token_id
    config = build_config(
        arguments,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # An embedding that serves as padding is never trained, which the end-of-text token must be.
        pad_token_id=None if pad == tokenizer.eos_token_id else pad,
    )
    path = path_of(config)
    if path.startswith(NO_PATH):
        raise InputError(f"the model's configuration is refused: {path.removeprefix(NO_PATH)}")
    set_seed(arguments.seed)
    return AtlasForCausalLM(config)


def check_blocks(model: PreTrainedModel, block_size: int) -> None:
    """Raises InputError where a block would not even fill one chunk of the memory."""
    chunk_size = getattr(model.config, "chunk_size", 2)
    if block_size < max(chunk_size, 2):
        raise InputError(
            f"block_size={block_size} is shorter than the memory's chunk_size={chunk_size}: "
            "raise --block-size, or lower the chunk with --set chunk_size=N"
        )


def prepare_data(
    tokenizer: PreTrainedTokenizerBase, train_texts: list[str], held_out_texts: list[str], block_size: int
) -> Data:
    """Blocks to train on and held out; without held-out texts, the last twentieth of the blocks is."""
    train_ids = encode(tokenizer, train_texts)
    blocks = to_blocks(train_ids, block_size, "the training text")
    if held_out_texts:
        return Data(train_ids, blocks, to_blocks(encode(tokenizer, held_out_texts), block_size, "the held-out text"))
    if len(blocks) < 2:
        raise InputError(
            f"the text has {train_ids.numel()} tokens, one block of {block_size} and none to hold out: "
            "give more text, a smaller --block-size, or --held-out"
        )
    held_out = max(len(blocks) // HELD_OUT_SHARE, 1)
    kept = blocks[:-held_out]
    return Data(kept.flatten(), kept, blocks[-held_out:])


def _tokenizer(arguments: argparse.Namespace, texts: list[str]) -> PreTrainedTokenizerBase:
    if arguments.resume:
        return load_tokenizer(partial_folder(arguments.output))
    source = arguments.tokenizer or arguments.init_from
    return load_tokenizer(source) if source else train_tokenizer(texts, arguments.vocab_size)


def _read(arguments: argparse.Namespace) -> Corpus:
    """All documents in memory."""
    corpus = read_corpus(arguments.texts, arguments.text_column) if arguments.texts else Corpus()
    if arguments.dataset is not None:
        splits = load_by_name(arguments.dataset, arguments.subset, streaming=False)
        found = texts_of(splits["train"], arguments.text_column, arguments.dataset)
        if not any(text.strip() for text in found):
            raise InputError(f"{arguments.dataset} holds no text: name a data set with text in it")
        corpus.train += found
        held_out = next((splits[name] for name in HELD_OUT_SPLITS if name in splits), None)
        if held_out is not None and not arguments.held_out:
            corpus.held_out += texts_of(held_out, arguments.text_column, arguments.dataset)
    return corpus


def _packed(data: Data, tokenizer: PreTrainedTokenizerBase) -> Data:
    end = tokenizer.eos_token_id
    places = (document_positions(blocks, end) for blocks in (data.train_blocks, data.held_out_blocks))
    return replace(data, **dict(zip(("train_positions", "held_out_positions"), places, strict=True)))


def _check(arguments: argparse.Namespace) -> None:
    if arguments.output is None:
        raise InputError("no output: name a folder with --output, or `output` in the file of --config")
    if not arguments.texts and arguments.dataset is None:
        raise InputError("no texts: name files or folders, or a dataset with --dataset")
    if arguments.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise InputError("--tensorboard needs the package tensorboard: pip install -e '.[train]' in atlas-hf's folder")
    if arguments.subset is not None and arguments.dataset is None:
        raise InputError(f"--subset {arguments.subset} belongs to a dataset: name it with --dataset")


def run(arguments: argparse.Namespace) -> None:
    _check(arguments)
    with joined_processes() as processes:
        _run(arguments, processes)


def _run(arguments: argparse.Namespace, processes: Processes) -> None:
    check_output(arguments.output, overwrite=arguments.overwrite, resume=arguments.resume)
    options = training_options(arguments, arguments.save_steps)
    training_arguments(options, arguments.output, processes)  # refused before the long work
    stream: DocumentStream | None = None
    if arguments.stream:
        stream = open_stream(
            *(arguments.texts, arguments.dataset, arguments.subset, arguments.text_column),
            hold_out=not arguments.held_out,
        )
        corpus = Corpus(stream.sample(), [] if arguments.held_out else stream.held_out_texts())
        if not corpus.train:
            raise InputError("the stream holds no text to train on: name a source with text in it")
        if not arguments.held_out and not corpus.held_out:
            raise InputError("the stream has too few documents to hold any out: name a text with --held-out")
    else:
        corpus = _read(arguments)
    held_out = read_measured(arguments.held_out, arguments.text_column) if arguments.held_out else corpus.held_out
    model = load_model(arguments.init_from, to_train=True) if arguments.init_from else None
    tokenizer = _tokenizer(arguments, corpus.train)
    model = model or new_model(arguments, tokenizer)
    check_vocabulary(tokenizer, model.config.vocab_size)
    check_blocks(model, arguments.block_size)
    data = prepare_data(tokenizer, corpus.train, held_out, arguments.block_size)
    data = _packed(data, tokenizer) if arguments.pack else data
    if stream is not None:
        pieces = {"packed": arguments.pack, "seed": arguments.seed}
        data = replace(data, stream=StreamedBlocks(stream.train, tokenizer, arguments.block_size, **pieces))
    describe(model, data, processes)
    skipped = {"command", "config", "default_widths", "resume", "overwrite", "output"}
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items() if k not in skipped}
    settings |= {
        "texts": [str(path) for path in arguments.texts],
        "held_out": [str(path) for path in arguments.held_out],
    }
    run_training(
        model,
        tokenizer,
        data,
        options,
        arguments.output,
        settings=settings,
        overwrite=arguments.overwrite,
        resume=arguments.resume,
        processes=processes,
    )
    print(f"Written to {arguments.output}: model, tokenizer, run.json, loss.png")
    print(f'Next: {command_name()} generate --model {arguments.output} --prompt "..."')


def describe(model: PreTrainedModel, data: Data, processes: Processes = ALONE) -> None:
    device = "cuda" if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    if processes.count > 1:
        device += f", on {processes.count} processes"
    print(f"Model: {model.num_parameters():,} parameters, vocabulary {model.config.vocab_size}, on {device}")
    source = "a stream that begins with " if data.stream else ""
    print(
        f"Data: {source}{len(data.train_blocks):,} blocks of {data.train_blocks.shape[1]} tokens to train on, "
        f"{len(data.held_out_blocks):,} held out",
        flush=True,
    )

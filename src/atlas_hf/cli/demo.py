"""Train a small Atlas on one novel, measure it on another, reload it and let it write.

Everything shown here is done by the parts that `train` and `generate` use, on the two texts that ship with the package.
"""

import argparse
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline, set_seed

from atlas_hf.cli.options import add_model_arguments, command_name, path, positive_int
from atlas_hf.cli.train import (
    add_training_arguments,
    check_blocks,
    describe,
    new_model,
    prepare_data,
    training_options,
)
from atlas_hf.training.run import LOSS_CURVE, run_training
from atlas_hf.training.staging import RUN_FILE, check_output
from atlas_hf.training.texts import demo_texts
from atlas_hf.training.tokenizer import train_tokenizer

PROMPT = "It was a fine morning, and Anne"
MODEL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=path, default=Path("runs/demo"), help="folder to write to")
    parser.add_argument("--vocab-size", type=positive_int, default=2048, help="size of the tokenizer's vocabulary")
    parser.add_argument("--prompt", default=PROMPT, help="what the trained model is to continue")
    parser.add_argument("--characters", type=positive_int, help="use only so many characters of each novel")
    add_training_arguments(parser, max_steps=200, batch_size=4, lr=5e-3)
    add_model_arguments(parser, defaults=MODEL)


def run(arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    check_output(arguments.output, overwrite=arguments.overwrite, flags=("--overwrite",))
    train_text, held_out_text = (text[: arguments.characters] for text in demo_texts())
    print("Training on Pride and Prejudice, holding out Persuasion (J. Austen)")
    tokenizer = train_tokenizer([train_text], arguments.vocab_size)
    model = new_model(arguments, tokenizer)
    check_blocks(model, arguments.block_size)
    data = prepare_data(tokenizer, [train_text], [held_out_text], arguments.block_size)
    describe(model, data)
    settings = {"demo": True, "max_steps": arguments.max_steps, "batch_size": arguments.batch_size}
    settings |= {"block_size": arguments.block_size, "lr": arguments.lr, "seed": arguments.seed}
    result = run_training(
        model,
        tokenizer,
        data,
        training_options(arguments),
        arguments.output,
        settings=settings,
        overwrite=arguments.overwrite,
    )
    _print_continuation(arguments)
    print("\nHeld-out perplexity per token, on the same tokens (lower is better)")
    print(f"  unigram, add 0.1      {result.unigram:8.1f}")
    print(f"  bigram, add 0.1       {result.bigram:8.1f}")
    print(f"  Atlas before training {result.before:8.1f}")
    print(f"  Atlas after training  {result.after:8.1f}")
    print(f"\nWritten in {time.perf_counter() - started:.0f} s:")
    for name in ("model.safetensors", "config.json", "tokenizer.json", LOSS_CURVE, RUN_FILE):
        print(f"  {arguments.output / name}")
    print(f'Next: {command_name()} generate --model {arguments.output} --prompt "..."')


def _print_continuation(arguments: argparse.Namespace) -> None:
    """Reload what was written as any user would."""
    model = AutoModelForCausalLM.from_pretrained(arguments.output)
    tokenizer = AutoTokenizer.from_pretrained(arguments.output)
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    set_seed(arguments.seed)
    written = writer(arguments.prompt, max_new_tokens=80, do_sample=True, temperature=0.8, top_k=50)
    print("\nReloaded through AutoModelForCausalLM; a continuation by pipeline('text-generation'):\n")
    print(written[0]["generated_text"])

"""Continue a prompt with a trained model."""

import argparse

import torch
from transformers import set_seed

from atlas_hf.cli.options import fraction, load_model, natural, path, positive_int, seed, temperature
from atlas_hf.training.errors import InputError
from atlas_hf.training.tokenizer import check_vocabulary, load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=path, required=True, help="folder of model and tokenizer")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=positive_int, default=100, help="tokens to add")
    parser.add_argument(
        "--greedy", action="store_true", help="always the likeliest token; the flags below then do nothing"
    )
    parser.add_argument("--temperature", type=temperature, default=0.8, help="below 1 sharper, above 1 flatter")
    parser.add_argument("--top-k", type=natural, default=50, help="sample among this many tokens (0: all)")
    parser.add_argument("--top-p", type=fraction, default=1.0, help="sample among the likeliest with this probability")
    parser.add_argument("--seed", type=seed, default=0, help="of the sampling")


def run(arguments: argparse.Namespace) -> None:
    model = load_model(arguments.model)
    tokenizer = load_tokenizer(arguments.model)
    check_vocabulary(tokenizer, model.config.vocab_size)
    if not arguments.prompt:
        raise InputError("--prompt is empty: give at least one character to continue")
    try:
        arguments.prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError("--prompt is not UTF-8: convert it, or check the terminal's encoding") from error
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    inputs = tokenizer(arguments.prompt, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    sampling = {} if arguments.greedy else {k: getattr(arguments, k) for k in ("temperature", "top_k", "top_p")}
    set_seed(arguments.seed)
    try:
        ids = model.generate(
            **inputs.to(model.device),
            max_new_tokens=arguments.max_new_tokens,
            do_sample=not arguments.greedy,
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **sampling,
        )
    except (ValueError, TypeError) as error:
        raise InputError(
            f"the model in {arguments.model} does not generate as its config.json and generation_config.json ask: {error}"
        ) from error
    print(tokenizer.decode(ids[0], skip_special_tokens=True))

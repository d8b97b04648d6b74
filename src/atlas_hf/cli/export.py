"""Write a trained model as a repository to share: weights, tokenizer, model card and, if wanted, the code.

Everything is written to the folder when it is complete, and nothing before.
"""

import argparse

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from atlas_hf.cli.options import load_model, path
from atlas_hf.modeling.configuration_atlas import AtlasConfig
from atlas_hf.sharing import save_for_hub
from atlas_hf.training.errors import InputError
from atlas_hf.training.staging import check_output, staged
from atlas_hf.training.tokenizer import check_vocabulary, load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=path, help="folder to write to, new or empty")
    parser.add_argument("--model", type=path, required=True, help="folder of model and tokenizer")
    parser.add_argument(
        "--with-code",
        action="store_true",
        help="add the code, so that it loads with trust_remote_code=True where atlas_hf is not installed",
    )
    parser.add_argument("--repo-id", metavar="USER/NAME", help="name it will have on the Hub, for the card's example")


def run(arguments: argparse.Namespace) -> None:
    check_output(arguments.output, flags=())
    if arguments.repo_id is not None:
        try:
            validate_repo_id(arguments.repo_id)
        except HFValidationError as error:
            raise InputError(f"--repo-id {arguments.repo_id} is no name on the Hub: {error}") from error
    model = load_model(arguments.model)
    if model.config.model_type != AtlasConfig.model_type:
        raise InputError(
            f"model {arguments.model} has model_type={model.config.model_type!r}: `export` knows "
            f"{AtlasConfig.model_type!r} only"
        )
    tokenizer = load_tokenizer(arguments.model)
    check_vocabulary(tokenizer, model.config.vocab_size)
    with staged(arguments.output) as folder:
        save_for_hub(model, folder, tokenizer, repo_id=arguments.repo_id, with_code=arguments.with_code)
    code = " and the code" if arguments.with_code else ""
    print(f"Written to {arguments.output}: weights, tokenizer, model card{code}")
    print(f"Next: hf upload {arguments.repo_id or 'USER/NAME'} {arguments.output}")

"""Byte-level BPE tokenizers: training one on the user's texts, loading one, and turning texts into blocks of tokens."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from atlas_hf.training.errors import InputError

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
# Label of a token that nothing is to predict, as transformers has it.
IGNORED = -100
LARGEST_VOCABULARY = 2**20
SMALLEST_VOCABULARY = len(pre_tokenizers.ByteLevel.alphabet()) + 2


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most `vocab_size` tokens; texts too short for that give fewer.

    It knows every byte, so that no text is ever out of vocabulary, and pads on the left, as generation needs.

    Raises:
        InputError: `vocab_size` leaves no room for the bytes and the two special tokens, or asks for more than 2^20.
    """
    if vocab_size > LARGEST_VOCABULARY:  # room for all of which the trainer takes at once
        raise InputError(f"vocab_size={vocab_size} is too large: give {LARGEST_VOCABULARY} at most")
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"vocab_size={vocab_size} is too small: give at least {SMALLEST_VOCABULARY}, the bytes and two marks"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        padding_side="left",
        # Without token types, which models that generate do not take.
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a folder.

    Raises:
        InputError: no folder, no tokenizer in it, or one without an end-of-text token.
    """
    if not Path(path).is_dir():
        raise InputError(f"tokenizer {path} is not a folder: name one written by save_pretrained")
    if not (Path(path) / "tokenizer_config.json").exists():
        raise InputError(f"{path} holds no tokenizer (no tokenizer_config.json): name one written by save_pretrained")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of whatever kind a damaged folder makes tokenizers raise
        raise InputError(f"{path} holds a tokenizer that cannot be loaded: {error}") from error
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer in {path} has no eos_token, which separates documents: set one and save it again"
        )
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model_vocab_size: int) -> None:
    """Raises InputError if the tokenizer can name tokens that the model has no embedding for."""
    if len(tokenizer) > model_vocab_size:
        raise InputError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's vocab_size is {model_vocab_size}: "
            "use the tokenizer that was saved with the model, or train a model for this one"
        )


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    """All documents as one row of token ids `[N]`, each ended by the end-of-text token."""
    ids = []
    for document in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        ids += document
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids, dtype=torch.long)


def to_blocks(ids: torch.Tensor, block_size: int, name: str) -> torch.Tensor:
    """Cut `ids [N]` into `[N // block_size, block_size]`; what is left over at the end is dropped.

    Raises:
        InputError: fewer tokens than one block; `name` says of what.
    """
    if ids.numel() < block_size:
        raise InputError(
            f"{name} has {ids.numel()} tokens, less than one block of {block_size}: give more text, or a smaller --block-size"
        )
    return ids[: ids.numel() // block_size * block_size].view(-1, block_size)


def document_positions(blocks: torch.Tensor, end: int) -> torch.Tensor:
    """Places `[N, L]` of tokens within their documents: 0 at each block's start and after each token `end`.

    As `position_ids` they tell the model where documents begin, so that no memory passes from one to the next.
    """
    place = torch.arange(blocks.shape[1]).expand(blocks.shape)
    begins = torch.zeros_like(blocks, dtype=torch.bool)
    begins[:, 1:] = blocks[:, :-1] == end
    return place - torch.where(begins, place, 0).cummax(1).values


def packed_labels(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Labels of packed documents: a document's first token (`positions` zero) is no other document's to predict."""
    return ids.masked_fill(positions == 0, IGNORED)

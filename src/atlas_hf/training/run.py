"""One whole run: held-out perplexity before, training, perplexity after, everything written into one folder."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from atlas_hf.training.errors import InputError
from atlas_hf.training.loss_curve import draw_loss_curve
from atlas_hf.training.perplexity import bigram_perplexity, model_perplexity, unigram_perplexity
from atlas_hf.training.staging import CHECKPOINTS, RUN_FILE, staged
from atlas_hf.training.trainer import TrainingOptions, train

LOSS_CURVE = "loss.png"


@dataclass(frozen=True)
class Data:
    """Token ids of a run: `train_ids [N]`, the blocks cut from them `[n, L]`, and held-out blocks `[m, L]`."""

    train_ids: torch.Tensor
    train_blocks: torch.Tensor
    held_out_blocks: torch.Tensor


@dataclass(frozen=True)
class Result:
    """Held-out perplexities of the baselines and of the model before and after training."""

    unigram: float
    bigram: float
    before: float
    after: float


def run_training(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    options: TrainingOptions,
    output: Path,
    *,
    settings: dict,
    overwrite: bool = False,
    resume: bool = False,
) -> Result:
    """Train, measure and write model, tokenizer, `run.json` and `loss.png` to `output`, all of them or none.

    `settings` describes the run; a run can only be resumed with the settings that it began with.
    """
    vocab_size = model.config.vocab_size
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    with staged(output, overwrite=overwrite, resume=resume) as folder:
        _agree_on_settings(folder, settings, resume)
        tokenizer.save_pretrained(folder)
        unigram = unigram_perplexity(data.train_ids, data.held_out_blocks, vocab_size)
        bigram = bigram_perplexity(data.train_ids, data.held_out_blocks, vocab_size)
        print(f"Held-out perplexity of add-0.1 counts: unigram {unigram:.1f}, bigram {bigram:.1f}")
        before = model_perplexity(model, data.held_out_blocks, options.batch_size)
        print(f"Held-out perplexity of the model before training: {before:.1f}")
        tokens = options.max_steps * options.batch_size * data.train_blocks.shape[1]
        print(f"Training: {options.max_steps} steps, {tokens:,} tokens, from a text of {data.train_ids.numel():,}")
        losses = train(model, data.train_blocks, options, folder / CHECKPOINTS, resume=resume)
        after = model_perplexity(model, data.held_out_blocks, options.batch_size)
        print(f"Held-out perplexity of the model after training: {after:.1f}")
        result = Result(unigram, bigram, before, after)
        model.save_pretrained(folder)
        levels = {"held-out, model": math.log(after), "held-out, bigram": math.log(bigram)}
        draw_loss_curve(folder / LOSS_CURVE, losses, levels)
        _write_run(folder, settings, perplexity=asdict(result), losses=losses)
    return result


def _write_run(folder: Path, settings: dict, **results) -> None:
    (folder / RUN_FILE).write_text(json.dumps({"settings": settings, **results}, indent=1) + "\n", encoding="utf-8")


def _agree_on_settings(folder: Path, settings: dict, resume: bool) -> None:
    if not resume:
        _write_run(folder, settings)
        return
    old = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["settings"]
    new = json.loads(json.dumps(settings))
    changed = [key for key in old if old[key] != new.get(key)]
    if changed:
        differences = ", ".join(f"{key}={new.get(key)!r} (was {old[key]!r})" for key in changed)
        raise InputError(f"the interrupted run in {folder} had other settings: {differences}; repeat them to resume")

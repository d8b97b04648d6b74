"""One whole run: held-out perplexity before, training, perplexity after, everything written into one folder."""

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from atlas_hf.training.errors import InputError
from atlas_hf.training.loss_curve import draw_loss_curve
from atlas_hf.training.perplexity import bigram_perplexity, model_perplexity, unigram_perplexity
from atlas_hf.training.processes import ALONE, Processes
from atlas_hf.training.report import to_json
from atlas_hf.training.staging import CHECKPOINTS, RUN_FILE, staged
from atlas_hf.training.trainer import BlockDataset, TrainingOptions, train, training_arguments

LOSS_CURVE = "loss.png"
BOARD = "tensorboard"


@dataclass(frozen=True)
class Data:
    """Token ids of a run: `train_ids [N]`, the blocks cut from them `[n, L]`, and held-out blocks `[m, L]`.

    Packed blocks have `train_positions` and `held_out_positions`, the tokens' places within their documents. With `stream`
    that is trained on, and `train_ids` and `train_blocks` are but its beginning.
    """

    train_ids: torch.Tensor
    train_blocks: torch.Tensor
    held_out_blocks: torch.Tensor
    train_positions: torch.Tensor | None = None
    held_out_positions: torch.Tensor | None = None
    stream: IterableDataset | None = None


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
    processes: Processes = ALONE,
) -> Result:
    """Train, measure and write model, tokenizer, `run.json` and `loss.png` to `output`, all of them or none.

    `settings` describes the run; a run can only be resumed with the settings that it began with. Several processes train
    together, and the main one writes.
    """
    vocab_size = model.config.vocab_size
    # The same names may have come to mean other texts, in which a resumed run would go on at the wrong place.
    settings = settings | {"data_sha256": _digest(data)}
    held_out, positions = data.held_out_blocks, data.held_out_positions
    with staged(output, overwrite=overwrite, resume=resume, processes=processes) as folder:
        model.to(training_arguments(options, folder / CHECKPOINTS, processes).device)
        _agree_on_settings(folder, settings, resume, processes)
        if processes.is_main:
            tokenizer.save_pretrained(folder)
        unigram = unigram_perplexity(data.train_ids, held_out, vocab_size, positions)
        bigram = bigram_perplexity(data.train_ids, held_out, vocab_size, positions)
        print(f"Held-out perplexity of add-0.1 counts: unigram {unigram:.1f}, bigram {bigram:.1f}")
        measuring = f"Measuring the model on {held_out.numel():,} held-out tokens"
        print(measuring, flush=True)
        before = model_perplexity(model, held_out, options.batch_size, positions)
        print(f"Held-out perplexity of the model before training: {before:.1f}")
        tokens = options.max_steps * options.batch_size * data.train_blocks.shape[1]
        source = "a stream" if data.stream else f"a text of {data.train_ids.numel():,}"
        print(f"Training: {options.max_steps} steps, {tokens:,} tokens, from {source}")
        examples = data.stream or BlockDataset(data.train_blocks, data.train_positions)
        board = folder / BOARD if options.tensorboard else None
        trainer, losses = train(
            model, examples, options, folder / CHECKPOINTS, resume=resume, processes=processes, board=board
        )
        # Of a sharded model every process holds a part, and only the wrapped one can be called.
        sharded = trainer.is_fsdp_enabled
        print(measuring, flush=True)
        after = model_perplexity(trainer.model_wrapped if sharded else model, held_out, options.batch_size, positions)
        print(f"Held-out perplexity of the model after training: {after:.1f}")
        result = Result(unigram, bigram, before, after)
        if sharded:
            # Under any other type Trainer writes no model
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
            trainer.save_model(str(folder))
            (folder / "training_args.bin").unlink(missing_ok=True)
        elif processes.is_main:
            model.save_pretrained(folder)
        if processes.is_main:
            if not any(folder.glob("*.safetensors")):
                raise RuntimeError(
                    f"the trained model was not written to {folder}: go on from its checkpoints with --resume"
                )
            levels = {"held-out, model": math.log(after), "held-out, bigram": math.log(bigram)}
            draw_loss_curve(folder / LOSS_CURVE, losses, levels)
            _write_run(folder, settings, perplexity=asdict(result), losses=losses)
    return result


def _write_run(folder: Path, settings: dict, **results) -> None:
    whole = folder / f"{RUN_FILE}.new"  # a full disk must not take the settings that a resumed run needs
    whole.write_text(to_json({"settings": settings, **results}), encoding="utf-8")
    os.replace(whole, folder / RUN_FILE)


def _digest(data: Data) -> str:
    digest = hashlib.sha256()
    for ids in (data.train_ids if data.stream else data.train_blocks, data.held_out_blocks):
        digest.update(ids.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _agree_on_settings(folder: Path, settings: dict, resume: bool, processes: Processes) -> None:
    if not resume:
        if processes.is_main:
            _write_run(folder, settings)
        return
    try:
        old = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / RUN_FILE} does not hold the settings of the interrupted run: begin anew with --overwrite"
        ) from error
    new = json.loads(to_json(settings))
    changed = [key for key in old if old[key] != new.get(key)]
    if changed:
        differences = ", ".join(f"{key}={new.get(key)!r} (was {old[key]!r})" for key in changed)
        raise InputError(f"the interrupted run in {folder} had other settings: {differences}; repeat them to resume")

"""Training on blocks of tokens with `transformers.Trainer`, with a line of progress every few steps."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from atlas_hf.training.errors import InputError


@dataclass(frozen=True)
class TrainingOptions:
    """What a run can be told. `save_steps` 0 writes no checkpoints."""

    max_steps: int = 500
    batch_size: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    seed: int = 0
    save_steps: int = 0


class BlockDataset(Dataset):
    """Rows of `blocks [N, L]` as inputs and labels."""

    def __init__(self, blocks: torch.Tensor):
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


class ProgressLines(TrainerCallback):
    """One line per log entry, readable on a terminal and in a file alike; ends a run whose loss is no number."""

    def __init__(self):
        self.started = None
        self.first_step = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, self.first_step = time.perf_counter(), state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs:
            return
        elapsed = time.perf_counter() - self.started
        done = max(state.global_step - self.first_step, 1)
        left = elapsed / done * (state.max_steps - state.global_step)
        print(
            f"  step {state.global_step:>5}/{state.max_steps}  loss {float(logs['loss']):6.3f}  "
            f"{elapsed:4.0f} s passed, {left:4.0f} s left",
            flush=True,
        )
        if math.isnan(float(logs["loss"])):
            control.should_training_stop = True


def train(
    model: PreTrainedModel, blocks: torch.Tensor, options: TrainingOptions, folder: Path, *, resume: bool = False
) -> list[tuple[int, float]]:
    """Train `model` in place on `blocks [N, L]`; returns the mean training loss of each logging interval, by step.

    Checkpoints go to `folder`; with `resume` the run goes on from the last of them, as if it had not been interrupted.

    Raises:
        InputError: the loss is no longer a number.
    """
    on_cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(options.warmup_steps, options.max_steps // 5),
        weight_decay=options.weight_decay,
        adam_beta2=0.95,
        seed=options.seed,
        logging_first_step=True,
        logging_steps=min(10, max(options.max_steps // 10, 1)),
        logging_nan_inf_filter=False,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=max(options.save_steps, 1),
        save_total_limit=2,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        disable_tqdm=True,
        report_to="none",
    )
    use_cache = model.config.use_cache
    trainer = Trainer(model=model, args=arguments, train_dataset=BlockDataset(blocks), callbacks=[ProgressLines()])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    # Trainer switches the cache off in the configuration that is saved; generation would then be slow for every reader.
    model.config.use_cache = use_cache
    losses = [(entry["step"], float(entry["loss"])) for entry in trainer.state.log_history if "loss" in entry]
    if any(math.isnan(loss) for _, loss in losses):
        raise InputError(f"learning_rate={options.learning_rate} made the loss diverge (not a number): lower --lr")
    return losses

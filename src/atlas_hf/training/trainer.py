"""Training on blocks of tokens with `transformers.Trainer`, with a line of progress every few steps."""

import argparse
import math
import time
import typing
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset
from transformers import HfArgumentParser, PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments
from transformers.hf_argparser import string_to_bool
from transformers.integrations import TensorBoardCallback

from atlas_hf.training.errors import InputError
from atlas_hf.training.optimizer import MuonAdamW, split_parameters
from atlas_hf.training.processes import ALONE, Processes
from atlas_hf.training.staging import last_checkpoint
from atlas_hf.training.tokenizer import packed_labels

OPTIMIZERS = ("adamw", "muon")
# Fields of `TrainingArguments` that options here decide, by the flag that names them.
DECIDED = {
    "max_steps": "--max-steps",
    "per_device_train_batch_size": "--batch-size",
    "learning_rate": "--lr",
    "seed": "--seed",
    "save_steps": "--save-steps",
    "save_strategy": "--save-steps",
    "output_dir": "--output",
    "report_to": "--tensorboard",
    "num_train_epochs": "--max-steps",
}
# Fields that only an evaluation by `Trainer` or a script of its examples would read; a run measures its held-out text itself,
# and goes on with --resume.
WITHOUT_EFFECT = (
    "per_device_eval_batch_size",
    "eval_strategy",
    "eval_steps",
    "eval_on_start",
    "load_best_model_at_end",
    "do_eval",
    "do_predict",
    "resume_from_checkpoint",
)


FIELD_TYPES = typing.get_type_hints(TrainingArguments)


@dataclass(frozen=True)
class TrainingOptions:
    """What a run can be told. `save_steps` 0 writes no checkpoints.

    `batch_size` counts the blocks of one step on all processes together. `optimizer` is one of `OPTIMIZERS`. `extra`: any
    other fields of `TrainingArguments`.
    """

    max_steps: int = 500
    batch_size: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    seed: int = 0
    save_steps: int = 0
    optimizer: str = "adamw"
    tensorboard: bool = False
    extra: dict = field(default_factory=dict)


def training_arguments(options: TrainingOptions, folder: Path, processes: Processes = ALONE) -> TrainingArguments:
    """`TrainingArguments` for `options`, with checkpoints in `folder`.

    Raises:
        InputError: a field that does not exist, is decided by a flag, or has a value that is refused; a batch that cannot
            be divided among the processes.
    """
    for name, flag in DECIDED.items():
        if name in options.extra:
            raise InputError(f"{name}={options.extra[name]!r} among the trainer's fields is given by {flag}: use that")
    extra = {name: _as_declared(name, value) for name, value in options.extra.items()}
    idle = [name for name in WITHOUT_EFFECT if name in extra]
    if idle:
        raise InputError(
            f"{', '.join(idle)} among the trainer's fields would have no effect: a run measures held-out text before and "
            "after it, and goes on with --resume; leave it out, or use `transformers.Trainer` itself"
        )
    unused = [name for name in ("optim", "optim_args") if name in extra and options.optimizer != "adamw"]
    if unused:
        raise InputError(
            f"{', '.join(unused)} among the trainer's fields would have no effect with --optimizer {options.optimizer}: "
            "leave it out, or use --optimizer adamw"
        )
    passes = extra.get("gradient_accumulation_steps", 1)
    if passes < 1 or options.batch_size % (passes * processes.count):
        raise InputError(
            f"batch_size={options.batch_size} cannot be divided among {processes.count} process(es) with "
            f"gradient_accumulation_steps={passes}: choose a multiple of their product"
        )
    on_cpu = not torch.cuda.is_available()
    fields = {
        "output_dir": str(folder),
        "max_steps": options.max_steps,
        "per_device_train_batch_size": options.batch_size // (passes * processes.count),
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": min(options.warmup_steps, options.max_steps // 5),
        "weight_decay": options.weight_decay,
        "adam_beta2": 0.95,
        "seed": options.seed,
        "logging_first_step": True,
        "logging_steps": min(10, max(options.max_steps // 10, 1)),
        "logging_nan_inf_filter": False,
        "save_strategy": "steps" if options.save_steps else "no",
        "save_steps": max(options.save_steps, 1),
        "save_total_limit": 2,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "disable_tqdm": True,
        "report_to": "none",
    }
    try:
        (arguments,) = HfArgumentParser(TrainingArguments).parse_dict({**fields, **extra})
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(
            f"the trainer's fields ({_told(extra)}) are refused: {error}; see TrainingArguments"
        ) from error
    return arguments


def _told(fields: dict) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _as_declared(name: str, value):
    """`value` as the switch or number that `TrainingArguments` declares, which itself converts none: a flag gives texts.

    Raises:
        InputError: a switch or number of another kind.
    """
    kinds = set(typing.get_args(FIELD_TYPES.get(name)) or (FIELD_TYPES.get(name),))
    optional = type(None) in kinds
    kind = next(iter(kinds - {type(None)}))
    if len(kinds) > 1 + optional or kind not in READERS:
        return value
    if optional and str(value).lower() in ("none", "null"):
        return None
    read, wanted = READERS[kind]
    try:
        return read(value)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise InputError(f"{name}={value!r} among the trainer's fields is not {wanted}: correct it") from error


def _number(value) -> float:
    if isinstance(value, bool):
        raise ValueError("a switch is no number")
    return float(value)


def _whole_number(value) -> int:
    number = _number(value)
    if not number.is_integer():
        raise ValueError("not a whole number")
    return value if isinstance(value, int) else int(number)


READERS = {
    bool: (lambda value: string_to_bool(str(value)), "true or false"),
    int: (_whole_number, "a whole number"),
    float: (_number, "a number"),
}


class Trainer(transformers.Trainer):
    """`transformers.Trainer` that lets neither gates, norms nor convolutions decay, and knows Muon."""

    with_muon = False

    def get_decay_parameter_names(self, model) -> list[str]:
        split = split_parameters(model)
        return [*split.matrices, *split.decayed]

    def _run_epoch(self, *args, **kwargs):
        # Trainer does not look whether a checkpoint is that of the last step, and would make one more.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def create_optimizer(self, model=None):
        if self.with_muon and self.optimizer is None:
            arguments = self.args
            self.optimizer = MuonAdamW(
                self.model if model is None else model,
                lr=arguments.learning_rate,
                weight_decay=arguments.weight_decay,
                betas=(arguments.adam_beta1, arguments.adam_beta2),
                eps=arguments.adam_epsilon,
            )
        return super().create_optimizer(model)


class BlockDataset(Dataset):
    """Rows of `blocks [N, L]` as inputs and labels, with their `positions [N, L]` if there are any."""

    def __init__(self, blocks: torch.Tensor, positions: torch.Tensor | None = None):
        self.blocks, self.positions = blocks, positions

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.blocks[index]
        if self.positions is None:
            return {"input_ids": block, "labels": block}
        positions = self.positions[index]
        return {"input_ids": block, "labels": packed_labels(block, positions), "position_ids": positions}


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
    model: PreTrainedModel,
    data: Dataset,
    options: TrainingOptions,
    folder: Path,
    *,
    resume: bool = False,
    processes: Processes = ALONE,
    board: Path | None = None,
) -> tuple[Trainer, list[tuple[int, float]]]:
    """Train `model` in place on `data`; returns the trainer and the mean training loss of each logging interval, by step.

    Checkpoints go to `folder`; with `resume` the run goes on from the last of them, as if it had not been interrupted.
    `board`: a folder for TensorBoard's log.

    Raises:
        InputError: the loss is no longer a number, the data fill no batch, or the trainer cannot start with the fields that
            it was given.
    """
    callbacks = [ProgressLines()]
    if board is not None and processes.is_main:
        from torch.utils.tensorboard import SummaryWriter  # needs a package that not everyone has

        callbacks.append(TensorBoardCallback(SummaryWriter(log_dir=str(board))))
    use_cache = model.config.use_cache
    arguments = training_arguments(options, folder, processes)
    if arguments.n_gpu > 1:
        # Trainer would take a batch for each of them, in threads of this process
        print(f"{arguments.n_gpu} GPUs are seen, one is used: start the command with torchrun to train on all of them")
        arguments._n_gpu = 1
    checkpoint = last_checkpoint(folder) if resume else None
    trainer = None
    try:
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
        trainer.with_muon = options.optimizer == "muon"
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except InputError:  # of the data
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError) as error:
        if not options.extra or (trainer is not None and trainer.state.global_step):
            raise
        # Many fields, an optimiser's for one, are read only when training starts.
        raise InputError(
            f"the trainer cannot start with its fields ({_told(options.extra)}): {error}; see TrainingArguments"
        ) from error
    # Trainer switches the cache off in the configuration that is saved; generation would then be slow for every reader.
    model.config.use_cache = use_cache
    losses = [(entry["step"], float(entry["loss"])) for entry in trainer.state.log_history if "loss" in entry]
    if any(math.isnan(loss) for _, loss in losses):
        raise InputError(f"learning_rate={options.learning_rate} made the loss diverge (not a number): lower --lr")
    if trainer.state.global_step < options.max_steps:
        raise InputError(
            f"training ended after {trainer.state.global_step} of {options.max_steps} steps, for the texts fill no batch of "
            f"{options.batch_size} blocks on every process and worker: give more text, or lower --batch-size or --block-size"
        )
    return trainer, losses

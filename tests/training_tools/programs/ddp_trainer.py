"""Run by `torchrun` or `accelerate launch`: trains a tiny model with `Trainer` and writes what each process saw.

Usage: ddp_trainer.py FOLDER ROWS_PER_STEP
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from atlas_hf import AtlasConfig, AtlasForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from training_checks import TINY


class Keep(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            self.gradients = {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters()}


def main(folder: Path, rows_per_step: int) -> None:
    torch.manual_seed(0)
    model = AtlasForCausalLM(AtlasConfig.atlas(**TINY))
    rows = torch.randint(3, 64, (8, 12), generator=torch.Generator().manual_seed(1)).tolist()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=2,
        per_device_train_batch_size=rows_per_step // world,
        max_grad_norm=0.0,
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="steps",
        save_steps=2,
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=0,
    )
    keep = Keep()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows], callbacks=[keep]
    )
    trainer.train()
    initialised = dist.is_available() and dist.is_initialized()
    report = {
        "world": dist.get_world_size() if initialised else 1,
        "backend": dist.get_backend() if initialised else None,
        "wrapper": type(trainer.model_wrapped).__name__,
        "losses": [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry],
    }
    rank = arguments.process_index
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    torch.save(keep.gradients, folder / f"gradients-{rank}.pt")
    if initialised:
        # A wrapper that outlives the group may wait for ever: https://github.com/pytorch/pytorch/issues/56297
        del trainer, keep
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

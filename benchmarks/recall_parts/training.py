"""Training one model on one setting: the same recipe for every mixer."""

import math
import time

import torch
import torch.nn.functional as F

from .models import RecallModel
from .task import IGNORE, SETTINGS, sample

WARMUP, WEIGHT_DECAY, CLIP, EVALUATE_EVERY = 0.1, 0.1, 1.0, 100
BATCH_SIZE, LEARNING_RATE = 32, 3e-3
# A run is told from another by these fields of its row
IDENTITY = ("setting", "mixer", "overrides", "seed", "steps", "batch_size", "learning_rate")


def schedule(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth, then a half cosine down to a tenth."""
    warmup = WARMUP * steps
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@torch.no_grad()
def accuracy(model: RecallModel, batches) -> float:
    """Share of queries answered right."""
    right = total = 0
    for ids, labels in batches:
        asked = labels != IGNORE
        right += int((model(ids).argmax(-1)[asked] == labels[asked]).sum())
        total += int(asked.sum())
    return right / total


def train(
    name: str,
    setting_name: str,
    seed: int,
    steps: int,
    overrides: dict,
    batch_size: int = BATCH_SIZE,
    learning_rate: float = LEARNING_RATE,
    report=print,
) -> dict:
    """Train and evaluate every 100 steps; returns a row of the results."""
    setting = SETTINGS[setting_name]
    torch.manual_seed(seed)
    model = RecallModel(name, setting.vocab_size, overrides)
    held_out = torch.Generator().manual_seed(10_000 + seed)
    batches = [sample(setting, 128, held_out) for _ in range(2)]
    fresh = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    plan = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: schedule(step, steps))
    curve, started = {}, time.process_time()
    for step in range(1, steps + 1):
        ids, labels = sample(setting, batch_size, fresh)
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        plan.step()
        if step % EVALUATE_EVERY == 0 or step == steps:
            curve[step] = round(accuracy(model, batches), 4)
            report(
                f"{setting_name} {name} {overrides or ''} seed {seed} step {step}: loss {loss:.3f}, recall {curve[step]:.3f}"
            )
    return {
        "setting": setting_name,
        "mixer": name,
        "overrides": overrides,
        "seed": seed,
        "steps": steps,
        "accuracy": curve,
        "cpu_seconds_per_step": round((time.process_time() - started) / steps, 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch_size": batch_size,
        "learning_rate": learning_rate,
    }

"""Times and memory of a training step, of a prefill and of decoding on the device, in bfloat16."""

import gc
import inspect
import statistics
import time

import torch

from atlas_hf import AtlasForCausalLM
from gpu_parts.contenders import Scale, SkippedError, build, forward_flops

DECODE_STEPS = 16


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(function, device: torch.device, scale: Scale) -> tuple[float, int]:
    """Median wall seconds of a call and the number of calls, after one or two that compile, tune and warm up."""
    begin = time.perf_counter()
    function()
    synchronize(device)
    if time.perf_counter() - begin < scale.seconds:
        function()
        synchronize(device)
    times, begin = [], time.perf_counter()
    while len(times) < scale.rounds and (not times or time.perf_counter() - begin < scale.seconds):
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times), len(times)


def peak_flops(device: torch.device, scale: Scale) -> float:
    """Rate of a large bfloat16 matrix product: what utilisation is measured against."""
    a = torch.randn(scale.peak_size, scale.peak_size, device=device, dtype=torch.bfloat16)
    seconds, _ = median_seconds(lambda: [a @ a for _ in range(10)], device, scale)
    return 10 * 2 * scale.peak_size**3 / seconds


def tokens_of(vocab_size: int, batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)


def training_step(model, ids):
    """Forward and backward pass with the language modelling loss; no optimiser. Atlas makes the loss without all logits."""
    model.train()
    more = {"skip_logits": True} if isinstance(model, AtlasForCausalLM) else {}

    def run():
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False, **more).loss.backward()

    return run


def prefill(model, ids):
    """Reading a prompt: the cache and the last token's logits."""
    model.eval()

    @torch.no_grad()
    def run():
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return run


def decoding(model, ids):
    """`DECODE_STEPS` tokens, one at a time, behind `ids`; the cache goes on from call to call."""
    model.eval()
    # fla's models have transformers' older name
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        cache = getattr(model(input_ids=ids, use_cache=True, logits_to_keep=1), name)
    token = ids[:, :1]

    @torch.no_grad()
    def run():
        nonlocal cache
        for _ in range(DECODE_STEPS):
            cache = getattr(model(input_ids=token, use_cache=True, **{name: cache}), name)

    return run


MAKERS = {"train": training_step, "prefill": prefill, "decode": decoding}


def measure(key: dict, scale: Scale, device: torch.device, peak: float) -> dict:
    """What belongs to a row's `contender`, `measure`, `batch` and `length`: figures, or the reason why there are none."""
    name, kind, batch, length = (key[n] for n in ("contender", "measure", "batch", "length"))
    row, model, step = {}, None, None
    # Of all contenders: products of float32 matrices on tensor cores, in three TF32 parts where a kernel has them
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    try:
        model = build(name, scale, device)
        step = MAKERS[kind](model, tokens_of(scale.skeleton["vocab_size"], batch, length, device))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds, rounds = median_seconds(step, device, scale)
        # A backward pass counts as two forward passes, and recomputation not at all
        flops = forward_flops(name, model, length) * (3 if kind == "train" else 1)
        rate = batch * (DECODE_STEPS if kind == "decode" else length) / seconds
        row |= {"seconds": seconds, "rounds": rounds, "tokens_per_second": rate, "utilisation": flops * rate / peak}
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        row["parameters"] = sum(p.numel() for p in model.parameters())
    except SkippedError as reason:
        row["skipped"] = str(reason)
    except Exception as error:
        # One contender's failure must not cost the others' figures: a GPU may be there for minutes only
        row["skipped"] = f"{type(error).__name__}: {str(error)[:500]}"
    del model, step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row

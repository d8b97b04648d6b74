"""Timing: contender, Llama and a matrix product take turns, so that what disturbs the machine disturbs all of them."""

import statistics
import subprocess
import sys
import threading
import time

import psutil
import torch
from transformers import StaticCache

BATCH, PEAK_SIZE = 2, 2048
ROUNDS, DECODE_STEPS = 5, 16
# Tokens that a static cache has room for behind its context
ROOM = 512


def timed(function) -> tuple[float, float]:
    """CPU seconds (of all threads) and wall seconds of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - cpu, time.perf_counter() - wall


def tokens_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 4096, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def training_step(model, length: int):
    """Forward and backward pass with the language modelling loss."""
    ids = tokens_of(length)

    def run():
        model.zero_grad(set_to_none=True)
        out = model(ids, labels=ids, use_cache=False)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()

    return run


def prefill(model, length: int):
    """Reading a prompt: the cache and the last token's logits."""
    ids = tokens_of(length)

    @torch.no_grad()
    def run():
        model(ids, use_cache=True, logits_to_keep=1)

    return run


def decoding(model, context: int):
    """`DECODE_STEPS` tokens, one at a time, behind a context; the cache goes on from call to call."""
    with torch.no_grad():
        cache = _cache(model(tokens_of(context), use_cache=True, logits_to_keep=1))
    token = tokens_of(1, seed=1)
    name = "cache_params" if type(model).__name__.startswith("Mamba") else "cache"

    @torch.no_grad()
    def run():
        for _ in range(DECODE_STEPS):
            model(token, use_cache=True, **{name: cache})

    run.cache = cache
    return run


def compiled_decoding(model, context: int):
    """As `decoding`, by `torch.compile` on a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=context + ROOM)
    with torch.no_grad():
        model(tokens_of(context), use_cache=True, logits_to_keep=1, cache=cache)
    step, token = torch.compile(model.forward, fullgraph=True), tokens_of(1, seed=1)

    @torch.no_grad()
    def run():
        for _ in range(DECODE_STEPS):
            step(token, use_cache=True, cache=cache)

    run.cache = cache
    return run


def _cache(out):
    return out.cache if getattr(out, "cache", None) is not None else out.cache_params


def cache_bytes(cache) -> int:
    """Bytes of all storage that a cache's tensors hold, whatever it is made of."""
    seen, total, stack = set(), 0, [cache]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            total += 0 if storage.data_ptr() in seen else storage.nbytes()
            seen.add(storage.data_ptr())
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
        elif hasattr(item, "__dict__"):
            stack += vars(item).values()
    return total


def compare(contender, reference, rounds: int = ROUNDS) -> dict:
    """Medians over `rounds` of taking turns: seconds, ratios to the reference, and to the matrix product's rate."""
    a = torch.randn(PEAK_SIZE, PEAK_SIZE)
    contender(), reference(), a @ a
    mine, other, peak = [], [], []
    for _ in range(rounds):
        other.append(timed(reference))
        mine.append(timed(contender))
        peak.append(timed(lambda: a @ a))
    return {
        "cpu_seconds": statistics.median(t[0] for t in mine),
        "wall_seconds": statistics.median(t[1] for t in mine),
        "cpu_ratio": statistics.median(o[0] / m[0] for m, o in zip(mine, other, strict=True)),
        "wall_ratio": statistics.median(o[1] / m[1] for m, o in zip(mine, other, strict=True)),
        "peak_flops_per_cpu_second": 2 * PEAK_SIZE**3 / statistics.median(t[0] for t in peak),
    }


def peak_memory(script: str, name: str, length: int, peer=None) -> int | None:
    """Bytes that a training step adds to a fresh process' resident memory at its highest; None if it failed."""
    command = [sys.executable, script, "--memory-of", name, "--length", str(length)]
    command += ["--peer", str(peer)] if peer else []
    done = subprocess.run(command, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else None


def memory_of_training_step(model, length: int) -> int:
    """Bytes above the built model, after a short step that loads the libraries' code.

    Sampled: what the kernel itself calls the highest also counts what the process was before it ran this program.
    """
    training_step(model, 32)()
    process, step = psutil.Process(), training_step(model, length)
    before = highest = process.memory_info().rss
    done = threading.Event()

    def watch():
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        step()
    finally:
        done.set()
        watcher.join()
    return highest - before

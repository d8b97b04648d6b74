"""One run on several processes: `torchrun` and `accelerate launch` start the same command many times."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import PartialState


@dataclass(frozen=True)
class Processes:
    """This process among those of a run."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this one prints and writes; the others only compute."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            PartialState().wait_for_everyone()


ALONE = Processes()


@contextlib.contextmanager
def joined_processes() -> Iterator[Processes]:
    """Join the processes that a launcher started, as its environment variables say; alone without one.

    Only the main process prints while the block runs. A group that was made here is left at the end.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    state = PartialState(cpu=not torch.cuda.is_available())
    processes = Processes(state.process_index, state.num_processes)
    with contextlib.ExitStack() as stack:
        if not processes.is_main:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield processes
    sys.stdout.flush()
    # A DistributedDataParallel that outlives the group takes it down without releasing the interpreter's lock, and gloo's
    # threads may wait for that lock: https://github.com/pytorch/pytorch/issues/56297
    gc.collect()
    state.destroy_process_group()

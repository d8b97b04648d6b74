"""Run by `torchrun`: shards a tiny model with raw `fully_shard` along `_no_split_modules` and trains it.

Usage: fsdp2.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from atlas_hf import AtlasConfig, AtlasForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from training_checks import TINY


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = AtlasForCausalLM(AtlasConfig.atlas(**TINY))
    mesh = init_device_mesh("cpu", (world,))
    wrapped = 0
    for module in list(model.modules()):
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mesh=mesh)
            wrapped += 1
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randint(3, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(2):
        mine = rows[4 * step : 4 * step + 4].chunk(world)[rank]
        loss = model(input_ids=mine, labels=mine, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / world)
    parameter = model.model.layers[0].memory.q_proj.weight
    report = {
        "world": world,
        "wrapped": wrapped,
        "kinds": sorted({type(p).__name__ for p in model.parameters()}),
        "shapes": [list(parameter.shape), list(parameter.to_local().shape)],
        "losses": losses,
    }
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

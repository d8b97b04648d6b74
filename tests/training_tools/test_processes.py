"""Two processes on the CPU: DDP by `torchrun` and by `accelerate launch`, and raw FSDP2, equal one process.

World size and wrapper are asserted: launchers that silently start one process, or wrap nothing, would pass otherwise.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_checks import assert_equal_gradients

PROGRAMS = Path(__file__).with_name("programs")
BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"]
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
machine_rank: 0
use_cpu: true
mixed_precision: 'no'
main_process_port: 0
rdzv_backend: static
"""


def run(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("report-*.json"))]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (report,) = run([sys.executable, str(PROGRAMS / "ddp_trainer.py"), str(folder), "4"], folder)
    assert (report["world"], report["wrapper"]) == (1, "AtlasForCausalLM")
    return report, torch.load(folder / "gradients-0.pt"), load_file(folder / "trainer/checkpoint-2/model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_ddp_equals_one_process(one_process, tmp_path, launcher):
    expected, gradients, weights = one_process
    command = TORCHRUN
    if launcher == "accelerate":
        (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
        command = [str(BIN / "accelerate"), "launch", "--config_file", "accelerate.yaml"]
    reports = run([*command, str(PROGRAMS / "ddp_trainer.py"), str(tmp_path), "4"], tmp_path)
    assert len(reports) == 2
    for rank, report in enumerate(reports):
        assert (report["world"], report["backend"]) == (2, "gloo")
        assert report["wrapper"] == "DistributedDataParallel"
        assert_equal_gradients(torch.load(tmp_path / f"gradients-{rank}.pt"), gradients)
    assert reports[0]["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    saved = load_file(tmp_path / "trainer/checkpoint-2/model.safetensors")
    assert saved.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-3, atol=2e-4)


@pytest.mark.slow
def test_fully_sharded_equals_one_process(tiny_model, tmp_path):
    reports = run([*TORCHRUN, str(PROGRAMS / "fsdp2.py"), str(tmp_path)], tmp_path)
    assert [r["world"] for r in reports] == [2, 2]
    assert {r["wrapped"] for r in reports} == {2}  # one for each decoder layer
    assert reports[0]["kinds"] == ["DTensor"]
    whole, local = reports[0]["shapes"]
    assert local == [whole[0] // 2, whole[1]]
    model, losses = tiny_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randint(3, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    for batch in rows.split(4):
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert reports[0]["losses"] == pytest.approx(losses, rel=1e-4)
    weights = torch.load(tmp_path / "weights.pt")
    assert weights.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")

"""Which path runs is chosen by name, told once, and never silently another than the one asked for."""

import json
import sys

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

import atlas_hf.kernels
from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.cli.main import main
from atlas_hf.modeling import dispatch
from atlas_hf.modeling.recurrence_chunk import _Walk
from atlas_hf.ops import chunk_atlas, naive_atlas, step_atlas

TINY = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32, "feature_rank": 3}
CUDA = torch.device("cuda")


class Double:
    """Stands in for `atlas_hf.kernels.scan`: PyTorch's walk, and a record of how it was asked."""

    def __init__(self, refusal=None):
        self.refusal, self.asked, self.walked = refusal, [], 0

    def supports(self, options, num_matrices, window, **widths):
        self.asked.append((options, num_matrices, window, widths))
        return self.refusal

    def walk(self, settings, num_state, *tensors):
        self.walked += 1
        return _Walk.apply(settings, num_state, *tensors)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_found", {part: [] for part in dispatch.PARTS})
    monkeypatch.setattr(dispatch, "_told", set())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def double(monkeypatch):
    """Available as if Triton were interpreted."""

    def make(refusal=None):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        dispatch._found["scan"] = (Double(refusal), None)
        return dispatch._found["scan"][0]

    return make


@pytest.fixture
def fake_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def part(monkeypatch, tmp_path):
    """A part of the kernels with a text of the test's own, as it would be found on a disk."""

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setattr(atlas_hf.kernels, "__path__", [str(tmp_path)])
        monkeypatch.delitem(sys.modules, f"atlas_hf.kernels.{name}", raising=False)
        return name

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"atlas_hf.kernels.{path.stem}", None)


@pytest.fixture
def arguments():
    generator = torch.Generator().manual_seed(0)

    def make(dtype=torch.float32, tokens=9):
        q, k, v = (torch.randn(2, tokens, 2, 4, generator=generator).to(dtype) for _ in range(3))
        memory = (
            torch.randn(2, 4, 5, generator=generator).to(dtype),
            torch.randn(2, 5, 4, generator=generator).to(dtype),
        )
        gate = torch.rand(2, tokens, 2, generator=generator).to(dtype)
        return (q, k, v, memory), {"log_alpha": -gate, "eta": gate, "gamma": gate[..., None].expand(-1, -1, -1, 2)}

    return make


def told():
    return CaptureLogger(logging.get_logger("transformers.models.atlas"))


def test_asked_for_without_a_gpu(arguments):
    tensors, gates = arguments()
    for form in (chunk_atlas, step_atlas):
        with pytest.raises(
            ValueError, match=r"kernels='triton' cannot run: the tensors are on cpu.*TRITON_INTERPRET=1"
        ):
            form(*tensors, **gates, kernels="triton")
    model = AtlasForCausalLM(AtlasConfig.omeganet(**TINY, kernels="triton"))
    with pytest.raises(ValueError, match=r"move model and inputs to one .* or set kernels='auto' or 'torch'"):
        model(torch.zeros(1, 5, dtype=torch.long))


def test_asked_for_in_double_precision_or_of_the_reference(arguments, double):
    double()
    tensors, gates = arguments(torch.float64)
    with pytest.raises(ValueError, match="the tensors are float64: convert model or inputs to float32 or bfloat16"):
        chunk_atlas(*tensors, **gates, kernels="triton")
    with pytest.raises(ValueError, match="naive_atlas is the reference"):
        naive_atlas(*tensors, **gates, kernels="triton")


def test_no_such_path(arguments):
    tensors, gates = arguments()
    for form in (chunk_atlas, step_atlas, naive_atlas):
        with pytest.raises(ValueError, match="kernels='cuda' is not allowed: choose one of auto, torch, triton"):
            form(*tensors, **gates, kernels="cuda")
    for wrong in ("cuda", None, True):
        with pytest.raises(StrictDataclassError, match="kernels"):
            AtlasConfig(kernels=wrong)


@pytest.mark.parametrize(
    ("text", "absent", "reason"),
    [
        ("import triton", "triton", r"triton is not installed: .*pip install -e '\.\[gpu\]'"),
        ("import fla", "fla", r"fla is not installed: .*pip install -e '\.\[gpu\]'"),
        (
            "raise OSError('libcuda.so.1')",
            None,
            r"cannot be imported \(OSError: libcuda.so.1\): reinstall triton and fla",
        ),
        ("from triton import no_such_name", None, r"cannot be imported \(ImportError: .*: reinstall triton and fla"),
        ("import no_such_module", None, r"cannot be imported \(ModuleNotFoundError: .*no_such_module"),
    ],
)
def test_what_stands_in_the_way_is_named(monkeypatch, part, fake_gpu, text, absent, reason):
    part("scan", text)
    if absent:
        monkeypatch.setitem(sys.modules, absent, None)
    with told() as captured:
        with pytest.raises(ValueError, match=f"kernels='triton' cannot run: .*{reason}"):
            dispatch.select_walk("triton", None, 2, 3, _On(CUDA))
        for _ in range(2):
            assert dispatch.select_walk("auto", None, 2, 3, _On(CUDA)) is None
    assert captured.out.count("Atlas runs without Triton") == (0 if absent else 1)


class _On:
    """All that the choice looks at of a tensor."""

    def __init__(self, device, dtype=torch.float32):
        self.device, self.dtype = device, dtype


def test_a_part_that_is_not_there(part, fake_gpu):
    part("other", "")
    with pytest.raises(ValueError, match=r"the installed atlas-hf has no atlas_hf\.kernels\.scan: install atlas-hf"):
        dispatch.select_walk("triton", None, 2, 3, _On(CUDA))


def test_code_that_travelled_alone(monkeypatch, fake_gpu):
    for name in [name for name in sys.modules if name.startswith("atlas_hf.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "atlas_hf", None)
    with pytest.raises(ValueError, match=r"atlas-hf is not installed: install atlas-hf"):
        dispatch.select_walk("triton", None, 2, 3, _On(CUDA))
    assert dispatch.select_walk("auto", None, 2, 3, _On(CUDA)) is None


def test_kernels_of_another_version(monkeypatch, part, fake_gpu):
    part("scan", "")
    monkeypatch.setattr(atlas_hf.kernels, "INTERFACE", dispatch.INTERFACE + 1)
    with pytest.raises(ValueError, match="interface 2, this modeling code needs 1: install the version that saved"):
        dispatch.select_walk("triton", None, 2, 3, _On(CUDA))


def test_auto_takes_triton_on_a_gpu_where_it_fits(monkeypatch, fake_gpu):
    double = Double()
    dispatch._found["scan"] = (double, None)
    assert dispatch.select_walk("auto", None, 2, 3, _On(CUDA)) == double.walk
    assert dispatch.select_walk("torch", None, 2, 3, _On(CUDA)) is None
    assert dispatch.select_walk("auto", None, 2, 3, _On(CUDA, torch.float64)) is None
    assert dispatch.select_walk("auto", None, 2, 3, _On(torch.device("mps"))) is None
    double.refusal = "momentum='carry' has no kernel"
    assert dispatch.select_walk("auto", None, 2, 3, _On(CUDA)) is None
    with pytest.raises(ValueError, match="cannot run: momentum='carry' has no kernel; or set"):
        dispatch.select_walk("triton", None, 2, 3, _On(CUDA))
    double.refusal = None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert dispatch.select_walk("auto", None, 2, 3, _On(CUDA)) is None
    with pytest.raises(ValueError, match=r"capability 8\.0 or above, and this one has 7\.5"):
        dispatch.select_walk("triton", None, 2, 3, _On(CUDA))


def test_the_walk_asked_for_is_the_one_that_runs(arguments, double):
    double = double()
    tensors, gates = arguments()
    expected = chunk_atlas(*tensors, **gates, chunk_size=4)[0]
    assert torch.equal(chunk_atlas(*tensors, **gates, chunk_size=4, kernels="torch")[0], expected)
    assert double.walked == 0
    assert torch.equal(chunk_atlas(*tensors, **gates, chunk_size=4, kernels="triton")[0], expected)
    assert double.walked == 1
    options, num_matrices, window, widths = double.asked[0]
    assert (options.chunk_size, num_matrices, window) == (4, 2, 2)
    assert widths == {"key_dim": 4, "value_dim": 4, "hidden_dim": 5, "features": 4}


def test_a_model_hands_its_choice_on(double):
    double = double()
    model = AtlasForCausalLM(AtlasConfig.omeganet(**TINY))
    ids = torch.arange(9)[None]
    for kernels, walks in (("auto", 0), ("torch", 0), ("triton", 1)):
        model.config.kernels = kernels
        model(ids, labels=ids).loss.backward()
        assert double.walked == walks


def test_each_path_is_told_once(arguments, double):
    double()
    tensors, gates = arguments()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        with told() as captured:
            for kernels in ("auto", "torch", "triton", "triton", "auto"):
                chunk_atlas(*tensors, **gates, kernels=kernels)
    finally:
        logging.set_verbosity(verbosity)
    assert captured.out == (
        "Atlas' recurrence runs on torch: kernels='auto' and tensors on cpu\n"
        "Atlas' recurrence runs on triton: kernels='triton' on cpu\n"
    )


def test_the_choice_is_no_part_of_a_checkpoint(tmp_path):
    config = AtlasConfig.omeganet(**TINY, kernels="triton")
    AtlasForCausalLM(config).save_pretrained(tmp_path)
    assert "kernels" not in json.loads((tmp_path / "config.json").read_text())
    assert AutoConfig.from_pretrained(tmp_path).kernels == "auto"
    assert AtlasForCausalLM.from_pretrained(tmp_path, kernels="torch").config.kernels == "torch"
    with pytest.raises(StrictDataclassError, match="kernels='cuda' is not allowed: choose one of auto, torch, triton"):
        AtlasForCausalLM.from_pretrained(tmp_path, kernels="cuda")


def test_info_says_which_path_would_run(monkeypatch, capsys, double, fake_gpu):
    def line(*flags):
        assert main(["info", "--size", "340M", *flags]) == 0
        return next(x for x in capsys.readouterr().out.splitlines() if x.startswith("kernels "))

    assert line() == f"{'kernels':<22}torch (kernels='auto' and tensors on cpu)"
    assert "none: kernels='triton' cannot run: the tensors are on cpu" in line("--set", "kernels=triton")
    double = double()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert line() == f"{'kernels':<22}triton (kernels='auto' on cuda)"
    options, num_matrices, window, widths = double.asked[0]
    config = AtlasConfig.atlas("340M")
    assert (options.chunk_size, options.rule, num_matrices, window) == (8, "muon", 2, config.omega_window)
    assert widths == {"key_dim": 64, "value_dim": 64, "hidden_dim": 128, "features": 101}


@pytest.mark.parametrize(
    ("preset", "line"),
    [
        ("omeganet", "triton (kernels='auto' on cuda)"),
        ("titans", "torch (momentum='carry' has no decoding kernel, 'restart' and 'none' have)"),
        ("atlas_plus_plus", "torch (a memory of 3 matrices has no decoding kernel, one of 2 (mlp) has)"),
    ],
)
def test_info_says_what_decodes(monkeypatch, capsys, fake_gpu, preset, line):
    pytest.importorskip("triton", reason="Triton has no build for this platform", exc_type=ImportError)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["info", "--size", "340M", "--preset", preset]) == 0
    assert f"{'kernels, decoding':<22}{line}" in capsys.readouterr().out.splitlines()

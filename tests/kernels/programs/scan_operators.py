"""A program for Triton's interpreter: the scan's operators keep PyTorch's rules for them, and torch.compile takes them."""

import torch
from scan_equality import KernelWalk, make_problem, poison, results

from atlas_hf.kernels import scan

CASE = {"memory": "mlp", "window": 2, "tokens": 5, "batch": 1, "heads": 1, "key_dim": 4, "hidden": 5}


class Recorder(KernelWalk):
    @staticmethod
    def apply(*arguments):
        Recorder.arguments = arguments
        return scan.walk(*arguments)


def main():
    torch.set_num_threads(1)
    torch.Tensor.new_empty = poison(torch.Tensor.new_empty)
    torch.empty_like = poison(torch.empty_like)
    results(make_problem(dtype=torch.float32, **CASE), CASE, Recorder)
    settings, num_state, *tensors = Recorder.arguments
    leaves = [x if x is None else x.detach() for x in tensors]
    leaves = [x if x is None or not x.is_floating_point() else x.requires_grad_() for x in leaves]
    wanted = [x for x in leaves if x is not None and x.requires_grad]

    def forward(*tensors):
        return scan.walk(settings, num_state, *tensors)

    def gradients(function):
        outputs = function(*leaves)
        return [*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), wanted, allow_unused=True)]

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(compiled), gradients(forward), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.isfinite().all()
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    # What needs no gradients keeps no states
    with torch.no_grad():
        torch.testing.assert_close(forward(*leaves)[0], forward(*leaves)[0], rtol=0, atol=0)
    operands = []
    forward_operator, scan.scan_forward = scan.scan_forward, lambda *a: operands.append(a) or forward_operator(*a)
    forward(*leaves)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(forward_operator, operands[0], test_utils=tests)
    print("kept")


if __name__ == "__main__":
    main()

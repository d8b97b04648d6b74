"""A Triton driver for a machine without a GPU: it answers what the autotuner and fla ask, and takes the first choice."""

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

PROPERTIES = {"max_shared_mem": 232448, "multiprocessor_count": 4, "max_num_regs": 65536, "warpSize": 32}
PROPERTIES |= {"sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1}


class CpuDriver(DriverBase):
    def __init__(self):
        self.utils = self

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        # By this backend's name fla uses torch.cpu, not torch.cuda
        return GPUTarget("cpu", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device=None):
        return 0

    def get_device_interface(self):
        return torch.cpu

    def get_device_properties(self, device=0):
        return PROPERTIES

    def get_empty_cache_for_benchmark(self):
        return torch.empty(1)

    def clear_cache(self, cache):
        pass

    def get_benchmarker(self):
        def run(function, quantiles=None, **arguments):
            function()
            return [1.0] * len(quantiles or [0])

        return run


def activate():
    # Nothing is measured, so one choice is as good as all
    Autotuner.prune_configs = lambda self, arguments: self.configs[:1]
    driver.set_active(CpuDriver())

"""Parts of the GPU benchmark: the contenders, parity on the device, the measurements, the report."""

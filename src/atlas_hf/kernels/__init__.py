"""Triton kernels; nothing here is needed on a CPU, and importing the package does not import Triton."""

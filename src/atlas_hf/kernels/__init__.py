"""Triton kernels of the recurrence. Never needed: `atlas_hf.modeling.dispatch` reaches for them where they can run."""

# What `modeling/dispatch.py` asks for; both change when the arguments of a kernel do.
INTERFACE = 1

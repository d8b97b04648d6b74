"""The scan over a sequence's chunks as two kernels, forwards and backwards; `atlas_hf.kernels.scan` launches them.

From below: `tiles` (loads and products), `plan` (sizes and choices), the steps of a chunk (`chunk`, `pairs`,
`newton_schulz`, `muon`, `reads`), their order (`walk`), `forward`; then their gradients (`gradients_reads`,
`gradients_errors`) and `backward`. Steps are functions of their own on the device too (`noinline`): a kernel made of one
piece keeps addresses and masks of all steps in registers at once.
"""

"""The few kernels that are written by hand, in Triton: where the compiler's own leave a measured share of a step.

``attention``: one new token (or a few) of each request over the paged cache, split along the context. ``thin``: a
linear layer on at most 16 rows, near the memory's bandwidth. ``turn``: per-head norm, rotary turn and the store into
the cache, in one pass over a projection. They need Triton and a CUDA device; ``models.compiled`` alone asks for them.
"""

"""How device work is recorded and replayed; knows no model.

Read in this order: ``keys`` and ``buckets`` (policy), ``slots`` (static buffers), ``tape`` and ``cuda``
(recorders), ``backends`` (the shape of the artifact), ``captured`` (the five verbs), ``capture`` (any function).
"""

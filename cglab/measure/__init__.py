"""Honest figures: statistics, interleaved A/B, parity, traces, memory, result records and claims.

Read in this order: ``statistics`` and ``ab`` (is there a difference), ``parity`` (is it the same work),
``trace``, ``profiling`` and ``prediction`` (where the time goes, what a graph can win), ``memory``, then
``records`` and ``claims`` (what was measured, and what it proves). pandas is loaded only where a frame is
asked for.
"""

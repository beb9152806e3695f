"""Stands in for vllm in a server on a CPU, which imports one name of it and never calls it (see ``_custom_ops``).

Only on the path of such a server: other packages look whether there is a vllm.
"""

"""Compiles what the kernels' public functions launch for CUDA capability 9.0, without a device; run as a process.

Triton decides at import whether kernels are interpreted, so this is no part of the tests' own process. The functions get
small tensors on the CPU: a kernel's signature knows no sizes, and what is fixed at compile time follows from shapes that
matter. Prints JSON: the kernels found in the package, those launched, and for each launch what came of it.
"""

import ast
import importlib
import inspect
import json
import pathlib
import sys
from itertools import product

import torch
import triton
from triton.runtime.jit import JITFunction

import cglab
from cglab.models.kernels.attention import paged_attention
from cglab.models.kernels.thin import thin_linear
from cglab.models.kernels.turn import turn_and_store

CAPABILITY = 90
HALF, FLOAT16, SINGLE = torch.bfloat16, torch.float16, torch.float32


class NoDevice:
    """What of a driver Triton asks before it launches."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)


def missing():
    """What the installed Triton lacks for this, or None."""
    try:
        from triton.backends.compiler import GPUTarget  # noqa: F401
        from triton.runtime.driver import driver
    except ImportError as error:
        return str(error)
    if not {"grid", "warmup"} <= inspect.signature(JITFunction.run).parameters.keys():
        return "JITFunction.run without grid and warmup"
    return None if hasattr(driver, "set_active") else "driver.set_active"


def modules():
    """The modules of the package that decorate a function with ``triton.jit``."""
    root = pathlib.Path(cglab.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if any(
            getattr(node, "attr", getattr(node, "id", None)) == "jit"
            for node in ast.walk(ast.parse(path.read_text()))
        ):
            yield importlib.import_module(".".join(("cglab", *path.relative_to(root).with_suffix("").parts)))


def own_kernels():
    """Every kernel and part of a kernel of the package, by name."""
    return {
        f"{module.__name__}.{name}": value
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__
    }


def attend(
    dtype, width, heads, kv_heads, dim, *, tree=False, window=None, parts=1, pages=5, page_type=torch.int64
):
    query, cache = torch.zeros(width, heads, dim, dtype=dtype), torch.zeros(32, kv_heads, dim, dtype=dtype)
    links = torch.ones(1, width, width, dtype=torch.bool) if tree else None
    table, row, length = (
        torch.zeros(2, pages, dtype=page_type),
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([width]),
    )
    paged_attention(
        query, cache, cache, table, row, length, torch.empty_like(query), parts=parts, page_size=16, width=width,
        window=window, tree=links,
    )  # fmt: skip


def multiply(dtype, rows, features, columns, *, gated, bias):
    weight = torch.zeros(features, columns, dtype=dtype)
    thin_linear(
        torch.zeros(rows, columns, dtype=dtype),
        weight,
        weight[:, 0].contiguous() if bias else None,
        gated=gated,
    )


def turn(dtype, heads, kv_heads, dim, *, norm):
    qkv, cache = (
        torch.zeros(5, heads + 2 * kv_heads, dim, dtype=dtype),
        torch.zeros(9, kv_heads, dim, dtype=dtype),
    )
    weight = torch.zeros(heads + kv_heads, dim, dtype=dtype) if norm else None
    turn_and_store(qkv, torch.zeros(5, 2, dim), weight, 1e-6, cache, cache, torch.zeros(5, dtype=torch.int64))


def launches():
    """Calls of the public functions, as (function, arguments, options)."""
    for width in range(1, 9):  # decode, chains and trees of a draft, each in one part and in several
        yield attend, (HALF, width, 8, 2, 32), {"tree": width != 7, "parts": 1 + width % 2}
    for tree, window, parts in product((False, True), (None, 7), (1, 2)):
        yield attend, (HALF, 3, 6, 2, 16), {"tree": tree, "window": window, "parts": parts}
        if tree and parts == 2:
            yield attend, (SINGLE, 3, 6, 2, 16), {"tree": tree, "window": window, "parts": parts}
    for dtype, dim in ((HALF, 80), (HALF, 128), (HALF, 256), (SINGLE, 128)):
        yield attend, (dtype, 1, 16, 8, dim), {"parts": 1}
    yield attend, (HALF, 1, 16, 8, 128), {"parts": 2}
    yield attend, (FLOAT16, 5, 14, 2, 64), {"tree": True, "parts": 2}
    yield attend, (HALF, 2, 2, 2, 16), {"page_type": torch.int32}
    yield attend, (SINGLE, 1, 2, 2, 16), {"pages": 1}
    for dtype, dim, parts in ((HALF, 256, 1), (HALF, 512, 2), (SINGLE, 256, 1)):
        yield (
            attend,
            (dtype, 64, 16, 2, dim),
            {"tree": True, "parts": parts},
        )  # more rows than a program takes
    for rows, gated, bias in product((1, 16), (False, True), (False, True)):
        yield multiply, (HALF, rows, 64, 1000), {"gated": gated, "bias": bias}
        if bias and not (gated and rows == 1):
            yield multiply, (SINGLE, rows, 64, 1000), {"gated": gated, "bias": bias}
    yield multiply, (FLOAT16, 16, 64, 1024), {"gated": True, "bias": False}
    yield multiply, (HALF, 1, 64, 5000), {"gated": True, "bias": False}
    yield multiply, (HALF, 1, 1, 1), {"gated": False, "bias": True}
    for dtype, dim, norm in ((HALF, 80, True), (HALF, 128, False), (FLOAT16, 128, True), (SINGLE, 256, True)):
        yield turn, (dtype, 6, 2, dim), {"norm": norm}


def main():
    if lacking := missing():
        return {"missing": f"Triton {triton.__version__} lacks {lacking}"}
    from triton.runtime.driver import driver

    driver.set_active(NoDevice())
    launch, launched, results = JITFunction.run, {}, []

    def compile_only(self, *args, grid, warmup, **options):
        launched[f"{self.fn.__module__}.{self.fn.__name__}"] = self
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        made[kernel.metadata.hash] = {
            "kernel": self.fn.__name__, "shared": kernel.metadata.shared, "ttir": str(kernel.asm["ttir"]),
            "forms": sorted(kernel.asm), "grid": list(grid),
        }  # fmt: skip
        return kernel

    JITFunction.run = compile_only
    for function, args, options in launches():
        made, error = {}, None
        try:
            function(*args, **options)
        except Exception as caught:  # noqa: BLE001 - what the compiler raises has many types; the test shows it
            error = f"{type(caught).__name__}: {caught}"
        results.append(
            {"call": f"{function.__name__}{args} {options}", "error": error, "made": list(made.values())}
        )
    found, reached, waiting = own_kernels(), set(), list(launched)
    while waiting:  # what a kernel calls is compiled with it
        name = waiting.pop()
        if name in found and name not in reached:
            reached.add(name)
            called = found[name].fn.__code__.co_names
            waiting += [f"{found[name].fn.__module__}.{each}" for each in called]
    return {"found": sorted(found), "reached": sorted(reached), "results": results}


if __name__ == "__main__":
    json.dump(main(), sys.stdout)

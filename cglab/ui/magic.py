"""The cell magic ``%%cglab_doctor``: the doctor looks at the call that a cell ends with.

    %%cglab_doctor
    def step(x):
        return x * x.sum().item()

    step(torch.ones(2))

What stands before the call runs as in any cell. ``%load_ext cglab`` brings the magic, and so does
``cglab.notebook.setup()``. Lines are those of the cell, the magic's own counted.
"""

from __future__ import annotations

import ast
import linecache
from typing import Any

from cglab.errors import InputError

_TAKE = "__cglab_take__"


def load_ipython_extension(shell: Any) -> None:
    """Registers the magic with an IPython shell; again is harmless."""

    def cglab_doctor(line: str, cell: str) -> None:
        """Say what would break a capture of the call that the cell ends with; a name keeps the report."""
        examine_cell(shell, line.strip(), cell)

    shell.register_magic_function(cglab_doctor, "cell")


def examine_cell(shell: Any, name: str, cell: str) -> None:
    """Runs a cell but for the call that it ends with, and prints what the doctor says of that call.

    Args:
        shell: an IPython shell, whose variables the cell sees and sets.
        name: a variable for the report; none if empty.
        cell: its text, without the line of the magic.

    Raises:
        InputError: if the cell does not end with a call, or ``name`` is no name.
        Exception: whatever the cell or the function raises.
    """
    # The doctor brings torch, which a shell that only loads the extension does not need.
    from cglab.graphs.doctor import examined

    if name and not name.isidentifier():
        raise InputError(
            f"%%cglab_doctor {name}: the report cannot have that name; give a variable's or none"
        )
    file, text = f"<cell {shell.execution_count}>", f"\n{cell}"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    tree = ast.parse(text, file)
    last = tree.body.pop() if tree.body else None
    if not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
        raise InputError("%%cglab_doctor: the cell must end with the call to look at, such as step(x)")
    shell.ex(compile(tree, file, "exec"))
    call = last.value
    call.args, call.func = [call.func, *call.args], ast.copy_location(ast.Name(_TAKE, ast.Load()), call.func)
    code = compile(ast.Expression(call), file, "eval")
    shell.user_ns[_TAKE] = _take
    try:
        function, args, inputs = shell.ev(code)
    finally:
        del shell.user_ns[_TAKE]
    report = examined(function, args, inputs)
    if name:
        shell.user_ns[name] = report
    print(report)  # noqa: T201 - a cell speaks by what it prints


def _take(function: Any, /, *args: Any, **inputs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call taken apart."""
    return function, args, inputs

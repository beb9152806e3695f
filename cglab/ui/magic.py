"""The cell magic ``%%cglab_doctor``: the doctor looks at the call that a cell ends with.

    %%cglab_doctor
    def step(x):
        return x * x.sum().item()

    step(torch.ones(2))

What stands before the call runs as in any cell. ``%load_ext cglab`` brings the magic, and so does
``cglab.notebook.setup()``. Lines are those of the cell, the magic's own counted; a line magic
or shell command over several lines counts as one.
"""

from __future__ import annotations

import ast
import inspect
import keyword
import linecache
from itertools import takewhile
from types import FunctionType
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
        InputError: if the cell does not end with a call, or ``name`` is no name or one that the call uses.
        Exception: whatever the cell or the function raises.
    """
    # The doctor brings torch, which a shell that only loads the extension does not need.
    from cglab.graphs.doctor import examined

    # As the file stands for the cell, its lines are those that the user wrote, not what they became.
    file = f"<cell {shell.execution_count}>"
    linecache.cache[file] = (len(cell) + 1, None, f"\n{cell}".splitlines(keepends=True), file)
    tree = ast.parse(_as_python(shell, cell), file)
    last = tree.body.pop() if tree.body else None
    call = last.value if isinstance(last, ast.Expr) else None
    if not isinstance(call, ast.Call) or ast.unparse(call.func).startswith("get_ipython()."):
        raise InputError("%%cglab_doctor: the cell must end with the call to look at, such as step(x)")
    used = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    if name and (not name.isidentifier() or keyword.iskeyword(name) or name in used):
        raise InputError(
            f"%%cglab_doctor {name}: the report cannot have that name; "
            "give a variable's, one that the call does not use, or none"
        )
    shell.ex(compile(tree, file, "exec"))
    looked_at = _described(call)
    call.args, call.func = [call.func, *call.args], ast.copy_location(ast.Name(_TAKE, ast.Load()), call.func)
    code = compile(ast.Expression(call), file, "eval")
    shell.user_ns[_TAKE] = _take
    try:
        function, args, inputs = shell.ev(code)
    finally:
        del shell.user_ns[_TAKE]
    report = examined(_on_line(function, file, call.lineno), args, inputs)
    if name:
        shell.user_ns[name] = report
    print(f"{looked_at}: {report}" if report.healthy else f"{looked_at}\n{report}")  # noqa: T201 - as a cell speaks


def _as_python(shell: Any, cell: str) -> str:
    """The cell as Python: magics, shell commands and indents as in any cell, lines where they were."""
    # The shell drops empty lines at the top; the line of the magic comes before them.
    empty = list(takewhile(lambda line: not line.strip(), cell.splitlines()))
    return "\n" * (1 + len(empty)) + str(shell.transform_cell(cell))


def _described(call: ast.Call) -> str:
    """The call in the words of the cell, and what of it is not looked at."""
    before = next((node for node in ast.walk(call.func) if isinstance(node, ast.Call)), None)
    ran = f" (its last call only: {ast.unparse(before)} ran before)" if before else ""
    return f"{ast.unparse(call)}{ran}"


def _take(function: Any, /, *args: Any, **inputs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call taken apart."""
    return function, args, inputs


def _on_line(function: Any, file: str, line: int) -> Any:
    """The function; if no line of it is the user's, called from the line of the cell that calls it."""
    from cglab.graphs.places import is_users

    within = inspect.unwrap(getattr(function, "forward", function))
    codes = [getattr(each, "__code__", None) for each in (within, type(within).__call__)]
    if any(code and is_users(code.co_filename) for code in codes):
        return function

    def called(*args: Any, **inputs: Any) -> Any:
        return function(
            *args, **inputs
        )  # one line below the first, which is therefore put one above the call's

    code = called.__code__.replace(co_filename=file, co_firstlineno=line - 1, co_name="<module>")
    return FunctionType(code, called.__globals__, called.__name__, None, called.__closure__)

"""Arithmetic over recorded metrics, and nothing else.

A formula is parsed into Python's syntax tree and checked node by node against a short list before it is ever
computed: numbers, metrics (``step_ms`` or ``ours.step_ms``), ``+ - * /``, and ``min``, ``max``, ``abs``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cglab.errors import ResultsError

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}


@dataclass(frozen=True)
class Formula:
    """A checked formula.

    Attributes:
        text: as written.
        metrics: the metrics that it reads, as ``(selection, metric)``.
    """

    text: str
    metrics: frozenset[tuple[str, str]]
    _tree: ast.expr

    def value(self, selections: Mapping[str, Mapping[str, Any]]) -> float:
        """Computes the formula.

        Args:
            selections: metrics by name of the selection.

        Raises:
            ResultsError: if a metric is missing or no number, or the arithmetic fails.
        """
        try:
            return float(_compute(self._tree, selections))
        except (ArithmeticError, TypeError) as error:
            raise ResultsError(f"{self.text}: {error}") from error


def parse_formula(text: str, selections: tuple[str, ...]) -> Formula:
    """Parses and checks a formula.

    Args:
        text: the formula. A bare metric belongs to the only selection.
        selections: names of the selections that it may read.

    Raises:
        ResultsError: for anything that is not arithmetic over metrics of these selections.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ResultsError(f"formula {text!r}: {error}") from error
    bound = _bind(tree, text, selections)
    return Formula(text, frozenset(_reads(bound)), bound)


def _bind(node: ast.expr, text: str, selections: tuple[str, ...]) -> ast.expr:
    """The same tree of allowed nodes only, with every metric as ``selection.metric``."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return node
        case ast.Name(id=metric) if len(selections) == 1:
            return ast.Attribute(ast.Name(selections[0]), metric)
        case ast.Attribute(value=ast.Name(id=name)) if name in selections:
            return node
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return ast.UnaryOp(op, _bind(operand, text, selections))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return ast.BinOp(_bind(left, text, selections), op, _bind(right, text, selections))
        case ast.Call(func=ast.Name(id=name), args=[_, *_], keywords=[]) if name in _FUNCTIONS:
            return ast.Call(node.func, [_bind(argument, text, selections) for argument in node.args], [])
    raise ResultsError(
        f"formula {text!r}: {ast.unparse(node)!r} is not allowed; use numbers, metrics of "
        f"{', '.join(selections)}, + - * /, and {', '.join(_FUNCTIONS)}"
    )


def _reads(node: ast.expr) -> Iterator[tuple[str, str]]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            yield inner.value.id, inner.attr


def _compute(node: ast.expr, selections: Mapping[str, Mapping[str, Any]]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Attribute(value=ast.Name(id=name), attr=metric):
            found = selections[name].get(metric)
            if not isinstance(found, (int, float)):
                raise ResultsError(f"{name}.{metric} is {found!r}, no number")
            return found
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_compute(operand, selections))
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_compute(left, selections), _compute(right, selections))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*(_compute(argument, selections) for argument in arguments))
    raise ResultsError(f"cannot compute {ast.dump(node)}")

"""The address contract: what a recording reads by address is held, and any move is refused by name.

Holding a tensor is not enough. ``parameter.data = x`` and ``module.weight = Parameter(x)`` leave the recording
reading the old memory without any error (B35, B36). So addresses are asked again, through the owner, before a
replay; a change in place stays valid, a move fails closed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from gc import get_referents
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from cglab.errors import AddressError

Getter = Callable[[], Tensor | nn.Module | None]


class AddressContract:
    """Named tensors with the addresses that a recording knows.

    A check takes a few calls in all, however many tensors there are: what the tables of a module hold is fetched in
    one call, and addresses are compared in C. Only where something differs is every entry looked up by name.

    Args:
        watched: modules, tensors, or functions that return the current tensor or module, by name.
    """

    def __init__(self, watched: Mapping[str, nn.Module | Tensor | Getter] | None = None) -> None:
        self._names: list[str] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._expected: list[int] = []
        self._held: list[Tensor] = []
        self._getters: list[tuple[str, Getter, int]] = []
        # Tables of tensors; for what they hold, one after the other: the name, the address, and where there is one.
        self._tables: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._addresses: list[int | None] = []
        self._indices: list[int] = []
        self._parents: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._families: list[dict[str, Any]] = []
        self._children: list[Any] = []
        self._owners: list[tuple[str, Getter, nn.Module]] = []
        self._modules: list[nn.Module] = []
        self._training: list[bool] = []
        for name, item in (watched or {}).items():
            self.watch(name, item)

    def __len__(self) -> int:
        return len(self._expected) + len(self._getters)

    def watch(self, name: str, item: nn.Module | Tensor | Getter) -> None:
        """Adds a tensor, every parameter and buffer of a module, or what a getter returns."""
        if isinstance(item, nn.Module):
            self._modules.append(item)
            self._training.append(item.training)
            for prefix, module in item.named_modules(prefix=name):
                if module._modules:  # a child that is replaced leaves its old tensors where they were
                    self._parents.append((prefix, module._modules, dict(module._modules)))
                    self._families.append(module._modules)
                    self._children += get_referents(module._modules)
                for table in (module._parameters, module._buffers):
                    self._add(prefix + ".", table)
        elif isinstance(item, Tensor):
            self._add("", {name: item})
        elif isinstance(found := item(), nn.Module):
            self._owners.append((name, item, found))
            self.watch(name, found)
        elif found is not None:
            self._getters.append((name, item, found.data_ptr()))
            self._held.append(found.detach())

    def _add(self, prefix: str, table: dict[str, Any]) -> None:
        tensors = {key: tensor for key, tensor in table.items() if tensor is not None}
        if not tensors:
            return
        for key, tensor in tensors.items():
            self._names.append(prefix + key)
            self._places.append((table, key))
            self._held.append(tensor.detach())  # keeps the memory, whatever happens to the owner (P31, B22)
            self._expected.append(tensor.data_ptr())
        self._tables.append(table)
        self._keys += table
        for entry in get_referents(table):
            is_tensor = isinstance(entry, Tensor)
            self._indices += [len(self._addresses)] * is_tensor
            self._addresses.append(entry.data_ptr() if is_tensor else None)

    def check(self) -> None:
        """Compares every address with the one that was recorded.

        Raises:
            AddressError: naming the tensors that moved or modules that were replaced, or if a watched module
                was switched between training and evaluation.
        """
        replaced = [name for name, get, module in self._owners if get() is not module]
        if replaced:
            raise AddressError(f"{replaced[0]} is another module than was captured; capture again")
        if [module.training for module in self._modules] != self._training:
            raise AddressError(
                "a module was switched between training and evaluation, and the recording does what it did before; "
                "switch it back, or capture again"
            )
        moved = [name for name, get, address in self._getters if _address(get()) != address]
        if moved or not self._unchanged():
            moved += self._moved()
        if moved:
            shown = ", ".join(moved[:3]) + (f" and {len(moved) - 3} more" if len(moved) > 3 else "")
            raise AddressError(
                f"memory that the recording reads has moved: {shown}. Copy new values in place "
                "(tensor.copy_(new) under torch.no_grad()), or capture again"
            )

    def _unchanged(self) -> bool:
        """Whether all tables hold what they held, at the same addresses: quick, and without names."""
        entries = get_referents(*self._tables)
        try:
            return (
                len(entries) == len(self._addresses)
                and self._same_addresses(entries)
                # A tensor that stays and is renamed is another one to the module: pruning does that.
                and list(chain.from_iterable(self._tables)) == self._keys
                and get_referents(*self._families) == self._children
            )
        except (TypeError, RuntimeError):  # an entry is no tensor any more
            return False

    def _same_addresses(self, entries: list[Any]) -> bool:
        if _compare_at_once is not None:
            return bool(_compare_at_once(entries, self._addresses, self._indices))
        return list(map(Tensor.data_ptr, map(entries.__getitem__, self._indices))) == self._expected

    def _moved(self) -> list[str]:
        """Names of tensors at another address and of other children, each looked up anew."""
        now = [_address(table.get(key)) for table, key in self._places]
        moved = [name for name, old, new in zip(self._names, self._expected, now, strict=True) if old != new]
        return moved + [
            f"{parent}.{child}" for parent, new, old in self._parents for child in old | new
            if old.get(child) is not new.get(child)
        ]  # fmt: skip

    def clear(self) -> None:
        """Lets go of everything."""
        for held in (
            self._names, self._places, self._expected, self._held, self._getters, self._tables, self._keys,
            self._addresses, self._indices, self._parents, self._families, self._children, self._owners, self._modules,
            self._training,
        ):  # fmt: skip
            held.clear()


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr()) if isinstance(tensor, Tensor) else 0


_compare_at_once = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
"""What CUDA graph trees ask before each replay, of entries, addresses and indices; only builds for CUDA have it."""


def closed_over(function: Callable[..., Any]) -> dict[str, nn.Module | Tensor | Getter]:
    """Modules and tensors that ``function`` reaches without being handed them, by name.

    Looks at the function itself, the object it is bound to or that is called, what a partial or a decorator
    wraps, its closure, its defaults and the globals it names; deeper ones (attributes of attributes, lists) are
    the caller's to watch.
    """
    if isinstance(function, nn.Module):
        return {type(function).__name__: function}
    owner = getattr(function, "__self__", None)
    found: dict[str, nn.Module | Tensor | Getter] = {}
    if isinstance(owner, nn.Module):
        found[type(owner).__name__] = owner
    inner = getattr(function, "func" if isinstance(function, functools.partial) else "__wrapped__", None)
    if inner is not None:
        found |= closed_over(inner)
    return found | {
        name: get for name, get in _reached(function) if isinstance(get(), nn.Module | Tensor)
    }  # fmt: skip


def _reached(function: Callable[..., Any]) -> Iterator[tuple[str, Getter]]:
    """What ``function`` names, each with a way to ask for it anew."""
    if isinstance(function, functools.partial):
        for place, value in [*enumerate(function.args), *function.keywords.items()]:
            yield f"argument {place}", functools.partial(_same, value)
        return
    plain = getattr(function, "__func__", function)
    if not hasattr(plain, "__code__"):  # an object that is called
        plain = type(function).__call__
    owner = getattr(function, "__self__", function)
    if not isinstance(owner, nn.Module):
        for name in list(getattr(owner, "__dict__", ())):
            yield f"{type(owner).__name__}.{name}", functools.partial(vars(owner).get, name)
    code = getattr(plain, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
        yield name, functools.partial(_content, cell, _content(cell, None))
    for name in code.co_names:
        yield name, functools.partial(plain.__globals__.get, name, plain.__globals__.get(name))
    for place, value in [*enumerate(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).items()]:
        yield f"default {place}", functools.partial(_same, value)


def _same(value: Any) -> Any:
    return value


def _content(cell: Any, fallback: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet, or deleted: the recording's own handle keeps the memory
        return fallback


class InputWatch(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects the outside tensors that a function reads: those that no operation inside has made.

    Attributes:
        outside: one detached handle for each storage, in order of first use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[int, Tensor] = {}
        self._inside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes what goes in and what comes out of one operation."""
        kwargs = kwargs or {}
        tree_iter = torch.utils._pytree.tree_iter
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel():
                address = leaf.untyped_storage().data_ptr()
                if address not in self._inside and address not in self.outside:
                    self.outside[address] = leaf.detach()
        result = func(*args, **kwargs)
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel():
                address = leaf.untyped_storage().data_ptr()
                if address not in self.outside:
                    self._inside[address] = leaf  # kept while watching, so that its address is not reused
        return result

"""What a stream capture refuses, told from the operation alone: used by the tape and by the doctor.

Tags mislead (``aten.index`` always claims a dynamic shape), so the lists name operations (N-dimensional boolean
indexing, ``repeat_interleave`` without its size, ...). Each refusal says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cglab.errors import (
    CaptureError,
    DynamicShapeError,
    HostReadError,
    NewInputError,
    UnsupportedOperationError,
)
from cglab.graphs.breaks import capturing
from cglab.graphs.writes import POINTING

HOST_READ_ADVICE = (
    "keep the value on the device (a tensor condition such as torch.where, or a static slot), "
    "or read it in a function marked @cglab.eager_break and capture with backend='breakable'"
)
DYNAMIC_ADVICE = (
    "use a form of fixed size (torch.where, a mask, topk with a fixed k, nonzero_static), "
    "or move it into a function marked @cglab.eager_break and capture with backend='breakable'"
)
GROUPED_ADVICE = (
    "compute it in bfloat16, for which a GPU of compute capability 9 or 10 has a kernel that reads nothing, or take "
    "another form of the experts (experts_implementation='batched_mm' in transformers), or an @cglab.eager_break"
)
NEW_INPUT_ADVICE = (
    "create it outside and hand it in as a slot, or build it from device operations such as torch.full"
)

_NUMBERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Numbers that torch has made tensors of: they are on the host wherever the rest is."""

HOST_READS = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose",
    "aten::_linalg_check_errors",
}  # fmt: skip
DYNAMIC = {
    "aten::nonzero", "aten::masked_select", "aten::unique_consecutive", "aten::unique_dim", "aten::_unique",
    "aten::_unique2", "aten::bincount", "aten::argwhere", "aten::unique_dim_consecutive",
}  # fmt: skip
UNSUPPORTED = {
    POINTING: "it points a tensor at other memory, which a replay would not see",
    "aten::resize_": "it may move the memory that later operations were recorded with",
    "aten::_pin_memory": "pinning memory queries the device",
    "aten::pin_memory": "pinning memory queries the device",
    "aten::record_stream": "it ties memory to a stream from inside the recording",
}


def _masks(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices or ())


def _keeps_memory(target: Tensor, source: Tensor | torch.UntypedStorage | None = None, *_: Any) -> bool:
    """Whether a tensor had no memory so far, or points to the same: so cuDNN sees an ``nn.LSTM``'s flat weights."""
    memory = target.untyped_storage()
    named = source.untyped_storage() if isinstance(source, Tensor) else source
    return not memory.nbytes() or (named is not None and named.data_ptr() == memory.data_ptr())


def _fills(
    target: Tensor,
    indices: Any,
    value: Tensor,
    accumulate: bool = False,
    **_: Any,
) -> bool:
    """Whether a number goes where a mask says (``y[y > 2] = 0``): torch fills then, and counts nothing on the host."""
    given = [index for index in indices if index is not None]
    number = value in _NUMBERS if target.device.type == "cpu" else value.device.type == "cpu"
    return number and value.numel() == 1 and len(given) == 1 and not accumulate


def _groups_on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch multiplies group by group on a GPU, up to ends that it copies to the host."""
    given = dict(zip(("self", "mat2", "offs", "bias", "out_dtype"), args, strict=False)) | kwargs
    dtypes = {given["self"].dtype, given["mat2"].dtype, given.get("out_dtype") or torch.bfloat16}
    return given.get("offs") is not None and dtypes != {torch.bfloat16}


def refusal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureError | None:
    """The error for an operation that a stream capture would refuse, without its place; None if it is fine.

    Args:
        func: the operator overload, as a dispatch mode sees it.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    name = func._schema.name
    checks = kwargs.get("check_errors")  # of linear algebra: the host is to raise if it failed
    if name in HOST_READS or checks:
        return HostReadError(
            "a value on the device is read on the host", operation=name, advice=HOST_READ_ADVICE
        )
    if name == "aten::_grouped_mm" and _groups_on_host(args, kwargs):
        return HostReadError(
            "the ends of the groups are read on the host: the grouped product has a kernel for bfloat16 alone",
            operation=name,
            advice=GROUPED_ADVICE,
        )
    masked = name in (
        "aten::index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
    ) and _masks(args[1])
    if name == "aten::lift_fresh" and args[0].dim() == 0:
        _NUMBERS[args[0]] = None
    masked = masked and not (name != "aten::index" and _fills(*args, **kwargs))
    sized = name != "aten::repeat_interleave" or kwargs.get("output_size") is not None
    if name in DYNAMIC or masked or not sized:
        what = (
            "a boolean mask selects a number of elements that depends on data"
            if masked
            else ("the shape of the result depends on data")
        )
        return DynamicShapeError(what, operation=name, advice=DYNAMIC_ADVICE)
    if name == "aten::lift_fresh" and args[0].dim() > 0 and args[0].numel():  # what is empty is not copied
        return NewInputError(
            f"a tensor of shape {tuple(args[0].shape)} is made from Python data inside the function",
            operation="torch.tensor",
            advice=NEW_INPUT_ADVICE,
        )
    if name in UNSUPPORTED and not (name == POINTING and _keeps_memory(*args)):
        return UnsupportedOperationError(
            f"{name} cannot be recorded: {UNSUPPORTED[name]}",
            operation=name,
            advice="do it before the capture, or in a function marked @cglab.eager_break",
        )
    if name.startswith("c10d::"):
        return UnsupportedOperationError(
            "a collective of torch.distributed returns a handle that a replay cannot wait for",
            operation=name,
            advice="use torch.distributed._functional_collectives, or an @cglab.eager_break",
        )
    return None


HOST_FUNCTIONS = {
    Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.item: "item", Tensor.cpu: "cpu",
    Tensor.__array__: "__array__", Tensor.__dlpack__: "__dlpack__", Tensor.__repr__: "repr",
    Tensor.__format__: "format", Tensor.__bool__: "bool", Tensor.__int__: "int", Tensor.__float__: "float",
    Tensor.__index__: "index", Tensor.pin_memory: "pin_memory", Tensor.__contains__: "in",
}  # fmt: skip
"""Python-level reads of device data; most of them never reach a dispatch mode."""


class HostReadWatch(torch.overrides.TorchFunctionMode):
    """Refuses host reads by their Python name; only for warm-ups and the doctor, since it can change user code.

    Inside a break nothing is refused: its body is eager.

    Args:
        report: called with the error for each read; it may raise it.
    """

    def __init__(self, report: Callable[[CaptureError], None]) -> None:
        super().__init__()
        self._report = report
        self._host: list[torch.device] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Checks one call."""
        kwargs = kwargs or {}
        if capturing():
            error = _host_function(func, args, kwargs, self._names_host)
            if error is not None:
                self._report(error)
        result = func(*args, **kwargs)
        if func is torch.device and any(map(self._names_host, [*args, *kwargs.values()])):
            self._host.append(result)
        return result

    def _names_host(self, value: Any) -> bool:
        """Whether the function itself says CPU: a tensor's own device is the CPU here, and the GPU on a GPU."""
        if isinstance(value, str):
            return value.partition(":")[0] == "cpu"
        return any(value is device for device in self._host)


def _host_function(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names_host: Callable[[Any], bool]
) -> CaptureError | None:
    name = HOST_FUNCTIONS.get(func)
    if func is Tensor.to and any(map(names_host, [*args[1:], *kwargs.values()])):
        name = "to"
    if name is not None:
        call = f"Tensor.{name}"
        error = UnsupportedOperationError if name == "pin_memory" else HostReadError
        return error(f"{call}() reads device data on the host", operation=call, advice=HOST_READ_ADVICE)
    if func in (torch.from_numpy, torch.frombuffer):
        return NewInputError(
            "host memory is brought in from inside the function",
            operation="torch.from_numpy",
            advice=NEW_INPUT_ADVICE,
        )
    return None

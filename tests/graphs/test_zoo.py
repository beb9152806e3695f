"""A zoo of operations, each captured, replayed on changed inputs and compared bit by bit, or refused as expected.

Every entry is a function of ``x`` [n, 8]; small helpers make positive values, indices and masks from it.
"""

import pytest
import torch
import torch.nn.functional as F

import cglab
from cglab.errors import (
    DynamicShapeError,
    HostReadError,
    NewInputError,
    SelfCheckError,
    UnsupportedOperationError,
)  # fmt: skip
from cglab.graphs.out_forms import same_bits

WIDTH = 8


def weight(rows, columns=WIDTH, like=None):
    return (
        torch.linspace(-1, 1, rows * columns, device=like.device, dtype=torch.float32)
        .view(rows, columns)
        .to(like.dtype)
    )


def index(x):
    return (x.float().abs() * 3).long() % WIDTH


def heads(x):
    return x.view(1, x.shape[0], 2, 4).transpose(1, 2)


def attend(x, **options):
    """Rows first again, as what is trimmed must be."""
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), **options)[0].transpose(0, 1)


def put(x):
    out = torch.zeros_like(x)
    rows = torch.arange(x.shape[0], device=x.device)
    out.index_put_((rows, index(x)[:, 0]), x[:, 0])
    return out


def inplace(name, *args):
    def run(x):
        y = x.clone()
        getattr(y, name)(*args)
        return y

    return run


def into(name):
    def run(x):
        out = torch.empty_like(x)
        getattr(torch, name)(x, out=out)
        return out

    return run


def foreach(x):
    ys = torch._foreach_add([x, x * 2], 1.0)
    torch._foreach_mul_(ys, 2.0)
    return torch.cat(ys, 1)


def copies(x):
    a, b = torch.empty_like(x), torch.empty_like(x)
    torch._foreach_copy_([a, b], [x, x + 1])
    return a * b


def views(x):
    y = x.clone()
    y[:, ::2].add_(1)
    y.t()[0].zero_()
    y.view(-1)[1:3] = 4
    return y.unflatten(1, (2, 4)).transpose(1, 2).flatten(1)


def gru(x):
    cell = torch.nn.GRUCell(WIDTH, WIDTH, device=x.device, dtype=x.dtype)
    return cell(x)


ONE = [
    "abs", "neg", "exp", "exp2", "expm1", "sigmoid", "tanh", "sin", "cos", "tan", "atan", "sinh", "cosh", "asinh", "erf",
    "erfc", "floor", "ceil", "round", "trunc", "frac", "sign", "sgn", "signbit", "square", "relu", "isnan", "isinf", "isfinite",
    "logical_not", "nan_to_num", "deg2rad", "rad2deg",
]  # fmt: skip
POSITIVE = ["sqrt", "rsqrt", "log", "log2", "log10", "log1p", "reciprocal", "lgamma", "digamma"]
ACTIVATIONS = [
    "silu", "gelu", "elu", "selu", "celu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "mish",
    "logsigmoid", "softsign", "tanhshrink", "relu6", "hardshrink", "softshrink", "normalize", "glu",
]  # fmt: skip
TWO = [
    "add", "sub", "mul", "div", "maximum", "minimum", "fmax", "fmin", "atan2", "hypot", "copysign", "eq", "ne", "lt", "le", "gt",
    "ge", "logical_and", "logical_or", "logical_xor", "fmod", "remainder", "nextafter", "logaddexp", "xlogy", "floor_divide",
]  # fmt: skip
REDUCTIONS = [
    "sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all", "logsumexp", "var", "std", "norm", "nansum",
    "softmax", "log_softmax", "cumsum", "cumprod", "argsort", "logcumsumexp", "count_nonzero",
]  # fmt: skip
NAMED = {
    "max_dim": lambda x: x.max(-1),
    "min_dim": lambda x: x.min(-1),
    "median": lambda x: x.median(-1),
    "cummax": lambda x: x.cummax(-1),
    "aminmax": lambda x: x.aminmax(dim=-1),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "sort": lambda x: x.sort(-1),
    "sort_stable": lambda x: x.sort(dim=-1, stable=True, descending=True),
    "topk": lambda x: x.topk(3, -1),
    "kthvalue": lambda x: x.kthvalue(2, -1),
    "mode": lambda x: index(x).mode(-1),
    "searchsorted": lambda x: torch.searchsorted(x.float().sort(-1).values, x.float()),
    "bucketize": lambda x: torch.bucketize(x.float(), torch.arange(4.0, device=x.device)),
    "gather": lambda x: x.gather(1, index(x)),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, index(x)[:, :1], x[:, :1]),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, index(x), torch.ones_like(x)),
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(1, index(x), x, "amax"),
    "index_select": lambda x: x.index_select(1, index(x)[0]),
    "index_add": lambda x: torch.zeros_like(x).index_add(1, torch.arange(WIDTH, device=x.device), x),
    "index_copy": lambda x: torch.zeros_like(x).index_copy(1, torch.arange(WIDTH, device=x.device).flip(0), x),
    "index_fill": lambda x: x.index_fill(1, index(x)[0, :1], 7.0),
    "index_put_": put,
    "index_integer": lambda x: x[torch.arange(x.shape[0], device=x.device).flip(0)],
    "take": lambda x: x.take(index(x)),
    "take_along_dim": lambda x: x.take_along_dim(index(x), 1),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "masked_assign": lambda x: torch.where(x > 0, 0.0, x),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x * 2),
    "where": lambda x: torch.where(x > 0, x, x * 0.5),
    "nonzero_static": lambda x: torch.nonzero_static(x[0] > 0, size=4, fill_value=0).float(),
    "repeat_interleave_sized": lambda x: x.repeat_interleave(
        torch.full((WIDTH,), 2, device=x.device), 1, output_size=2 * WIDTH),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1),
    "pow": lambda x: x.pow(3),
    "float_power_int": lambda x: x.pow(2.0),
    "polar": lambda x: torch.polar(x.float(), x.float()).real,
    "complex": lambda x: torch.view_as_real(torch.complex(x.float(), x.float()).exp()),
    "fft": lambda x: torch.fft.rfft(x.float()).abs(),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "stack": lambda x: torch.stack([x, -x], 1),
    "chunk": lambda x: x.chunk(2, 1)[1] * 2,
    "split": lambda x: x.split([3, 5], 1)[1] + 1,
    "unbind": lambda x: x.unbind(1)[2] + 1,
    "tensor_split": lambda x: x.tensor_split(3, 1)[0] + 1,
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(2, 1),
    "rot90": lambda x: x.unflatten(1, (2, 4)).rot90(1, (1, 2)) + 0,
    "tile": lambda x: x.tile(1, 2),
    "repeat": lambda x: x.repeat(1, 3),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1) + 0,
    "pad": lambda x: F.pad(x, (1, 2), value=3.0),
    "triu": lambda x: (x.unsqueeze(1) * x.unsqueeze(2)).triu(1),
    "tril": lambda x: (x.unsqueeze(1) * x.unsqueeze(2)).tril(),
    "diagonal": lambda x: (x.unsqueeze(1) * x.unsqueeze(2)).diagonal(dim1=1, dim2=2) + 0,
    "diag_embed": lambda x: x.diag_embed(),
    "unfold": lambda x: x.unfold(1, 3, 2) + 0,
    "as_strided": lambda x: x.clone().as_strided((x.shape[0], 4), (8, 2)) + 0,
    "contiguous": lambda x: x.unflatten(1, (2, 4)).transpose(1, 2).contiguous(),
    "reshape_copy": lambda x: x.unflatten(1, (2, 4)).transpose(1, 2).reshape(x.shape[0], 8),
    "to_dtype": lambda x: x.to(torch.float16).to(x.dtype),
    "to_int": lambda x: (x * 10).to(torch.int32),
    "fp8": lambda x: x.to(torch.float8_e4m3fn).to(torch.float32),
    "view_dtype": lambda x: (x + 0).view(torch.int32 if x.dtype == torch.float32 else torch.int16) + 1,
    "bitwise": lambda x: (index(x) & 3) | (index(x) ^ 1),
    "shift": lambda x: (index(x) << 2) >> 1,
    "embedding": lambda x: F.embedding(index(x), weight(WIDTH, 3, x)),
    "embedding_bag": lambda x: F.embedding_bag(index(x), weight(WIDTH, 3, x), mode="sum"),
    "matmul": lambda x: x @ weight(WIDTH, 5, x),
    "linear": lambda x: F.linear(x, weight(5, WIDTH, x)),
    "addmm": lambda x: torch.addmm(x[:, :5], x, weight(WIDTH, 5, x)),
    "bmm": lambda x: torch.bmm(x.unsqueeze(1), x.unsqueeze(2)).squeeze(-1),
    "baddbmm": lambda x: torch.baddbmm(x.unsqueeze(1)[:, :, :1], x.unsqueeze(1), x.unsqueeze(2)),
    "einsum": lambda x: torch.einsum("ni,ij->nj", x, weight(WIDTH, 4, x)),
    "outer": lambda x: torch.einsum("ni,nj->nij", x, x),
    "mv": lambda x: x @ weight(1, WIDTH, x)[0],
    "bilinear": lambda x: F.bilinear(x, x, weight(3 * WIDTH, WIDTH, x).view(3, WIDTH, WIDTH)),
    "conv1d": lambda x: F.conv1d(x.unsqueeze(1), weight(2, 3, x).view(2, 1, 3)),
    "conv2d": lambda x: F.conv2d(x.view(-1, 1, 2, 4), weight(2, 4, x).view(2, 1, 2, 2)),
    "avg_pool": lambda x: F.avg_pool1d(x.unsqueeze(1), 2),
    "max_pool": lambda x: F.max_pool1d(x.unsqueeze(1), 2),
    "adaptive_pool": lambda x: F.adaptive_avg_pool1d(x.unsqueeze(1), 3),
    "interpolate": lambda x: F.interpolate(x.unsqueeze(1), scale_factor=2.0),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(WIDTH, device=x.device, dtype=x.dtype), torch.ones(WIDTH, device=x.device, dtype=x.dtype)),
    "cross_entropy": lambda x: F.cross_entropy(x, index(x)[:, 0], reduction="none"),
    "cosine": lambda x: F.cosine_similarity(x, x + 1),
    "cdist": lambda x: torch.cdist(x.float(), weight(3, WIDTH, x.float())),
    "sdpa": lambda x: attend(x).reshape(x.shape),
    "sdpa_causal": lambda x: attend(x, is_causal=True),
    "sdpa_mask": lambda x: attend(
        x, attn_mask=torch.ones(x.shape[0], x.shape[0], device=x.device).tril().bool()),
    "gru_like": lambda x: torch.sigmoid(x) * torch.tanh(x) + (1 - torch.sigmoid(x)) * x,
    "foreach": foreach,
    "foreach_copy": copies,
    "views_written": views,
    "fill_diagonal": lambda x: (x.unsqueeze(1) * x.unsqueeze(2)).clone()[0].fill_diagonal_(0.0),
    "zeros_ones_full": lambda x: torch.zeros_like(x) + torch.ones_like(x) * torch.full_like(x, 2.5) + x,
    "arange": lambda x: x + torch.arange(WIDTH, device=x.device),
    "linspace": lambda x: x + torch.linspace(0, 1, WIDTH, device=x.device),
    "eye": lambda x: x @ torch.eye(WIDTH, device=x.device, dtype=x.dtype),
    "zero_size": lambda x: torch.cat([x, x[:, :0]], 1) + x[:, :0].sum(),
    "scalar_tensor": lambda x: x * torch.tensor(2.0),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.float().sigmoid()),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape, device=x.device, dtype=x.dtype),
    "multinomial": lambda x: torch.multinomial(x.float().softmax(-1), 2),
    "normal_": lambda x: torch.empty_like(x).normal_() + x,
    "randperm": lambda x: x[:, torch.randperm(WIDTH, device=x.device)],
    "add_": inplace("add_", 1.5),
    "mul_": inplace("mul_", -2.0),
    "clamp_": inplace("clamp_", -0.3, 0.3),
    "fill_": inplace("fill_", 2.0),
    "transpose_": lambda x: x.clone().transpose_(0, 1).transpose_(0, 1) + 1,
    "out_exp": into("exp"),
    "out_sigmoid": into("sigmoid"),
}  # fmt: skip

# Refused, and why: a stream capture would refuse it, or replay a frozen value.
REFUSED = {
    "item": (lambda x: x * x[0, 0].item(), HostReadError),
    "int": (lambda x: x[:, : int(x[0, 0].abs()) + 1], HostReadError),
    "bool": (lambda x: x if x.sum() > 1e9 else x * 2, HostReadError),
    "tolist": (lambda x: x * x[0].tolist()[0], HostReadError),
    "numpy": (lambda x: x * float(x.float().numpy()[0, 0]), HostReadError),
    "equal": (lambda x: x * torch.equal(x, x), HostReadError),
    "allclose": (lambda x: x * torch.allclose(x, x), HostReadError),
    "cpu": (lambda x: x * x.cpu().sum(), HostReadError),
    "to_cpu": (lambda x: x + x.to("cpu"), HostReadError),
    "contains": (lambda x: x * (3.0 in x), HostReadError),
    "format": (lambda x: x * len(f"{x.sum()}"), HostReadError),
    "repr": (lambda x: x * len(repr(x)), HostReadError),
    "one_hot": (lambda x: F.one_hot(index(x)[:, 0], WIDTH), HostReadError),  # checks its range on the host
    "nonzero": (lambda x: x.nonzero(), DynamicShapeError),
    "argwhere": (lambda x: x.argwhere(), DynamicShapeError),
    "where_one": (lambda x: torch.where(x > 0)[0], DynamicShapeError),
    "masked_select": (lambda x: x.masked_select(x > 0), DynamicShapeError),
    "mask_index": (lambda x: x[x > 0], DynamicShapeError),
    "mask_index_uint8": (lambda x: x[(x > 0).to(torch.uint8)], DynamicShapeError),
    "mask_put": (lambda x: x.clone().index_put_((x > 0,), x.new_zeros(())), DynamicShapeError),
    "unique": (lambda x: x.float().unique(), DynamicShapeError),
    "unique_dim": (lambda x: x.float().unique(dim=0), DynamicShapeError),
    "unique_consecutive": (lambda x: x.unique_consecutive(), DynamicShapeError),
    "bincount": (lambda x: torch.bincount(index(x).flatten()), DynamicShapeError),
    "repeat_interleave": (lambda x: x.repeat_interleave(index(x)[0], 1), DynamicShapeError),
    "tensor": (lambda x: x + torch.tensor([1.0] * WIDTH, dtype=x.dtype, device=x.device), NewInputError),
    "from_numpy": (lambda x: x + torch.from_numpy(__import__("numpy").ones(WIDTH, "float32")), NewInputError),
    "resize_": (lambda x: x.clone().resize_(2, 2), UnsupportedOperationError),
    "set_": (lambda x: x.clone().set_(x.untyped_storage()), UnsupportedOperationError),
    "sparse": (lambda x: x.to_sparse().to_dense(), UnsupportedOperationError),
    "pin_memory": (lambda x: x.pin_memory() * 2, UnsupportedOperationError),
    "other_numbers": (lambda x: x + COUNTER.pop(), SelfCheckError),
}  # fmt: skip
COUNTER = list(range(64))

ZOO = {
    **{name: (lambda x, n=name: getattr(torch, n)(x)) for name in ONE},
    **{name: (lambda x, n=name: getattr(torch, n)(x.abs() + 0.1)) for name in POSITIVE},
    **{name: (lambda x, n=name: getattr(F, n)(x)) for name in ACTIVATIONS},
    **{name: (lambda x, n=name: getattr(torch, n)(x, x.flip(1) + 0.5)) for name in TWO},
    **{name: (lambda x, n=name: getattr(torch, n)(x, dim=-1)) for name in REDUCTIONS},
    **NAMED,
}


def seed(device, value):
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)


def recorded_bits(device, function, dtype):
    """Captures at 4 rows, then replays 4, 3 and 1 rows against padded eager after the same seed."""
    generator = torch.Generator().manual_seed(7)
    captured = cglab.capture(
        function, slots={"x": cglab.Slot(pad=1.0)}, buckets=(4,), strict=True, clone=True
    )
    with captured:
        for rows in (4, 3, 1, 4):
            x = torch.randn(rows, WIDTH, generator=generator).to(dtype).to(device)
            if captured._captured is None:
                captured.warm(x=x)
            seed(device, rows)
            got = torch.utils._pytree.tree_leaves(captured(x=x))
            seed(device, rows)
            with torch.no_grad():
                expected = torch.utils._pytree.tree_leaves(
                    captured._captured.run_padded_eager({"x": x}, rows, 4)
                )
            assert len(got) == len(expected)
            for left, right in zip(got, expected, strict=True):
                assert same_bits(left, right), f"{rows} rows differ"
        assert captured.coverage().captured == 4 and captured.coverage().eager == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ZOO)
def test_an_operation_replays_to_the_bit(name, dtype):
    recorded_bits(torch.device("cpu"), ZOO[name], dtype)


def test_the_zoo_is_wide():
    assert len(ZOO) >= 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", ZOO)
def test_an_operation_replays_to_the_bit_on_a_gpu(cuda, name):
    recorded_bits(cuda, ZOO[name], torch.float32)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_is_refused_with_its_error_and_line(name):
    function, error = REFUSED[name]
    captured = cglab.capture(function, slots={"x": cglab.Slot(pad=1.0)}, buckets=(4,), strict=True)
    x = torch.randn(4, WIDTH)
    with pytest.raises(error) as caught:
        captured(x=x)
    assert type(caught.value) is error
    if error is not SelfCheckError:
        assert caught.value.place is not None and caught.value.place.file == __file__, "the user's own line"
        assert caught.value.advice, "says what to do"
    assert captured.captured_sizes == []
    captured.close()

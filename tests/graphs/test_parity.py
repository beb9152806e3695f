"""Captured against eager: random functions over random sequences of batches that grow and shrink.

One suite for both backends, both recorders, padding on and off. The oracle is the same function, eager, over the same
padded static buffers: outputs and outside state must agree to the bit. Row by row they must agree with the live step.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import cglab
from cglab.graphs.captured import Captured
from cglab.graphs.keys import ShapeKey
from cglab.graphs.options import Options
from cglab.graphs.out_forms import same_bits
from cglab.graphs.slots import Slot

WIDTH, ROOM = 8, 40
BUCKETS = (1, 2, 4, 8)
SLOTS = {
    "x": Slot((-1, WIDTH), torch.float32, pad=0.5),
    "slot": Slot((-1,), torch.int64, pad=0),
    "length": Slot((-1,), torch.int64, pad=1),
}


@cglab.eager_break
def scale_into(h, out):
    out.copy_(h * 0.5 + 1)


@cglab.eager_break
def shifted(h):
    return h.roll(1, 1)


def seen_slots(h, length):
    """Slots 1 to ``length``; slot 0 is where padding writes, in any order, so nobody reads it."""
    slots = torch.arange(ROOM, device=h.device)
    return (slots > 0) & (slots <= length.unsqueeze(1))


class Zoo:
    """Steps that keep [n, WIDTH]; each reads the inputs and may write the cache."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(11)
        self.cache = torch.randn(ROOM, WIDTH, generator=generator).to(device)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator).to(device) / WIDTH**0.5

    def linear(self, h, slot, length):
        return F.silu(h @ self.weight)

    def norm(self, h, slot, length):
        return F.rms_norm(h, (WIDTH,)) * 1.5

    def inplace(self, h, slot, length):
        y = h.clone()
        y.mul_(1.5).add_(length.unsqueeze(1))
        y[:, 1::2].neg_()
        return y

    def views(self, h, slot, length):
        y = h.unflatten(1, (2, 4)).transpose(1, 2).contiguous().flatten(1)
        y[:, :2].zero_()
        return y + h.flip(1)

    def put(self, h, slot, length):
        self.cache.index_put_((slot,), h)
        return self.cache.index_select(0, slot) + h

    def copy(self, h, slot, length):
        self.cache.index_copy_(0, slot, h.tanh())
        return h + self.cache[1:9].mean(0)

    def gather(self, h, slot, length):
        reach = seen_slots(h, length)
        return h + (reach.unsqueeze(-1) * self.cache).sum(1) / length.unsqueeze(1)

    def topk(self, h, slot, length):
        values, indices = h.topk(3, -1)
        return torch.zeros_like(h).scatter(1, indices, values.softmax(-1))

    def sdpa(self, h, slot, length):
        q = h.view(-1, 2, 1, 4)
        keys = self.cache.view(1, ROOM, 2, 4).transpose(1, 2).expand(h.shape[0], -1, -1, -1)
        seen = seen_slots(h, length).view(-1, 1, 1, ROOM)
        return F.scaled_dot_product_attention(q, keys, keys, attn_mask=seen).reshape(h.shape)

    def dropout(self, h, slot, length):
        return F.dropout(h, 0.3, training=True)

    def sort(self, h, slot, length):
        return h.sort(-1).values.cumsum(-1) * 0.1

    def foreach(self, h, slot, length):
        a, b = torch._foreach_mul([h, h + 1], 0.5)
        return torch.where(a > b, a, b)

    def broken(self, h, slot, length):
        out = torch.empty_like(h)
        scale_into(h * 1, out)
        return out

    def returned(self, h, slot, length):
        return shifted(h + 0) - h


STEPS = [name for name in vars(Zoo) if not name.startswith("_")]
ROW_WISE = {"linear", "norm", "inplace", "views", "topk", "sort", "foreach", "broken", "returned"}


def program(zoo, names):
    def run(x, slot, length):
        h = x
        for name in names:
            h = getattr(zoo, name)(h, slot, length)
        return h, h.argmax(-1)

    return run


def inputs(rows, generator, device):
    return {
        "x": torch.randn(rows, WIDTH, generator=generator).to(device),
        "slot": (torch.randperm(ROOM - 1, generator=generator)[:rows] + 1).to(device),
        "length": torch.randint(1, ROOM, (rows,), generator=generator).to(device),
    }


def seed(device, value):
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)


def check(device, backend, padding, names, sizes, data_seed):
    zoo = Zoo(device)
    function = program(zoo, names)
    options = Options(
        backend=backend, padding=padding, strict=True, clone=True, inline_breaks=backend == "full"
    )
    generator = torch.Generator().manual_seed(data_seed)
    with Captured("zoo", function, SLOTS, BUCKETS, device, options) as captured:
        start = zoo.cache.clone()
        captured.capture()
        assert same_bits(zoo.cache[1:], start[1:]), "a capture leaves no trace"
        for number, rows in enumerate(sizes):
            values = inputs(rows, generator, device)
            before = zoo.cache.clone()
            seed(device, number)
            got = captured(**values)
            after = zoo.cache.clone()
            bucket = captured.pad(rows)
            zoo.cache.copy_(before)
            seed(device, number)
            if isinstance(bucket, int):
                expected = captured.run_padded_eager(values, rows, bucket)
            else:
                with torch.no_grad():
                    expected = function(**values)
            assert all(map(same_bits, got, expected)), f"step {number}, {rows} rows, bucket {bucket}"
            assert same_bits(zoo.cache[1:], after[1:]), (
                f"state after step {number}, {rows} rows, bucket {bucket}"
            )
            if set(names) <= ROW_WISE:
                with torch.no_grad():
                    live = function(**values)
                torch.testing.assert_close(got[0], live[0], rtol=1e-4, atol=1e-5)
        fits = [rows for rows in sizes if (rows in BUCKETS if not padding else rows <= BUCKETS[-1])]
        assert captured.counts.captured == len(fits) and captured.counts.eager == len(sizes) - len(fits)


backends = pytest.mark.parametrize("backend", ["full", "breakable"])
paddings = pytest.mark.parametrize("padding", [True, False], ids=["padded", "exact"])


@backends
@paddings
@settings(max_examples=50)
@given(
    names=st.lists(st.sampled_from(STEPS), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    data_seed=st.integers(0, 2**16),
)
def test_random_functions_over_random_batches(device, backend, padding, names, sizes, data_seed):
    check(device, backend, padding, names, sizes, data_seed)


@backends
@paddings
@pytest.mark.parametrize("name", STEPS)
def test_each_step_over_batches_that_grow_and_shrink(device, backend, padding, name):
    check(device, backend, padding, [name], [8, 3, 1, 5, 8, 2, 4, 7, 9, 6], 3)


@backends
def test_all_steps_in_one_function(device, backend):
    check(device, backend, True, STEPS, [8, 5, 1, 2, 8, 7, 3], 4)


@pytest.mark.soak
@backends
@paddings
@settings(max_examples=500)
@given(
    names=st.lists(st.sampled_from(STEPS), min_size=1, max_size=10),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    data_seed=st.integers(0, 2**16),
)
def test_many_random_functions_over_random_batches(device, backend, padding, names, sizes, data_seed):
    check(device, backend, padding, names, sizes, data_seed)


@backends
def test_bfloat16_is_bitwise_too(device, backend):
    weight = torch.randn(WIDTH, WIDTH, device=device).bfloat16()
    slots = {"x": Slot((-1, WIDTH), torch.bfloat16, pad=1.0)}

    def step(x):
        out = torch.empty_like(x)
        scale_into(F.silu(x @ weight), out)
        return F.rms_norm(out, (WIDTH,)).softmax(-1), out.argmax(-1)

    options = Options(backend=backend, strict=True, clone=True, inline_breaks=backend == "full")
    with Captured("bf16", step, slots, BUCKETS, device, options) as captured:
        captured.capture()
        for rows in (8, 3, 5, 1, 2, 7):
            x = torch.randn(rows, WIDTH, device=device).bfloat16()
            bucket = captured.pad(rows)
            assert all(map(same_bits, captured(x=x), captured.run_padded_eager({"x": x}, rows, bucket)))


@backends
def test_poison_in_open_tails_reaches_no_live_row(device, backend):
    """Oracle 3 at this level: what a policy leaves open may hold anything."""
    slots = {
        "x": Slot((-1, WIDTH), torch.float32, pad=cglab.Padding.HEAD),
        "slot": Slot((-1,), torch.int64, pad=0),
    }
    cache = torch.zeros(ROOM, WIDTH, device=device)

    def step(x, slot):
        h = F.rms_norm(x, (WIDTH,))
        cache.index_copy_(0, slot, h)
        return h * 2

    options = Options(backend=backend, strict=True, clone=True)
    with Captured("poison", step, slots, (8,), device, options) as captured:
        captured.capture()
        for rows in (8, 5, 1):
            values = {
                "x": torch.randn(rows, WIDTH, device=device),
                "slot": torch.arange(1, rows + 1, device=device),
            }
            clean, kept = captured(**values), cache.clone()
            captured.load(values, rows, 8)
            poisoned = captured.buffers.poison(rows, 8)
            assert poisoned == (["x"] if rows < 8 else [])
            got = captured.trim(captured.replay(ShapeKey(8)), rows, 8)
            assert same_bits(got, clean) and same_bits(cache[1:], kept[1:])

"""The hand-written kernels against formulas spelt out: Triton's interpreter on a CPU, the device where there is one."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="no Triton here: it comes with torch for CUDA")

from cglab.errors import InputError
from cglab.models.kernels.attention import MOST_DIM, block_for, paged_attention, parts_for, rows_for
from cglab.models.kernels.thin import thin_linear
from cglab.models.kernels.turn import turn_and_store
from cglab.models.rotary import rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def least_of_a_matrix_unit(monkeypatch):
    """The interpreter multiplies blocks of any size, a device those with sums of at least 16."""
    if DEVICE == "cpu":
        from triton.runtime.interpreter import interpreter_builder

        monkeypatch.setitem(interpreter_builder.codegen_fns, "min_dot_size", lambda *_: (1, 1, 16))


def random(*shape):
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize(("features", "columns"), [(8, 16), (50, 70), (6, 4100), (2, 1)])
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_thin_linear_is_a_linear_layer(features, columns, rows, gated, has_bias):
    torch.manual_seed(0)
    x, weight = random(rows, columns), random(features, columns) / columns**0.5
    bias = random(features) if has_bias else None
    right = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = right.chunk(2, dim=-1)
        right = torch.nn.functional.silu(gate) * up
    found = thin_linear(x, weight, bias, gated=gated)
    assert torch.allclose(found.double(), right, rtol=1e-4, atol=1e-5)
    if rows > 1:  # what a row gets does not depend on how many others there are
        assert torch.equal(found[:2], thin_linear(x[:2], weight, bias, gated=gated))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (3, 1, 20), (1, 1, 8)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_turn_and_store_is_norm_rotation_and_two_stores(heads, kv_heads, dim, has_norm):
    torch.manual_seed(0)
    tokens, eps = 5, 1e-6
    qkv, turn = random(tokens, heads + 2 * kv_heads, dim), random(tokens, 2, dim)
    norm = random(heads + kv_heads, dim) if has_norm else None
    keys, values = random(9, kv_heads, dim), random(9, kv_heads, dim)
    expected_keys, expected_values = keys.clone(), values.clone()
    slots = torch.tensor([3, 0, 8, 1, 5], device=DEVICE)
    turned = qkv[:, : heads + kv_heads]
    if norm is not None:
        turned = torch.nn.functional.rms_norm(turned, (dim,), eps=eps) * norm
    query, key = rotate(turned, turn).split((heads, kv_heads), dim=1)
    expected_keys[slots], expected_values[slots] = key, qkv[:, heads + kv_heads :]
    found = turn_and_store(qkv, turn, norm, eps, keys, values, slots)
    for ours, right in zip((*found, keys, values), (query, key, expected_keys, expected_values), strict=True):
        assert torch.allclose(ours, right, rtol=1e-4, atol=1e-5)


def spelt_out(query, keys, values, table, rows, lens, *, page_size, width, window, tree=None):
    """Attention of every new token over the positions that it sees, in float64."""
    out, group = torch.empty_like(query, dtype=torch.float64), query.shape[1] // keys.shape[1]
    for request, index in product(range(len(lens)), range(width)):
        before = int(lens[request]) - width
        nodes = torch.arange(index + 1) if tree is None else tree[request, index].nonzero()[:, 0].cpu()
        end = before + len(nodes)  # a node stands as deep in its tree as it has others before it
        first = 0 if window is None else max(end - window, 0)
        seen = torch.cat([torch.arange(first, max(before, first)), before + nodes])
        positions = seen[seen >= first].to(query.device)
        slots = table[rows[request]][positions // page_size] * page_size + positions % page_size
        key, value = (cache[slots].double().repeat_interleave(group, 1) for cache in (keys, values))
        asked = query[request * width + index].double()
        weight = torch.einsum("hd,phd->hp", asked, key).div(query.shape[2] ** 0.5).softmax(-1)
        out[request * width + index] = torch.einsum("hp,phd->hd", weight, value)
    return out


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("window", [None, 7])
def test_paged_attention_reads_what_each_token_sees_and_nothing_else(parts, width, window):
    torch.manual_seed(0)
    requests, heads, kv_heads, dim, page_size, pages = 3, 6, 2, 20, 4, 50
    keys, values = random((requests * pages + 1) * page_size, kv_heads, dim), None
    values = torch.randn_like(keys)
    table = torch.randperm(requests * pages, device=DEVICE).view(requests, pages) + 1
    table = torch.cat([torch.zeros_like(table[:1]), table])
    rows, lens = torch.tensor([2, 1, 3], device=DEVICE), torch.tensor([width, 117, 200], device=DEVICE)
    sizes = {"page_size": page_size, "width": width, "window": window}
    query = random(requests * width, heads, dim)
    right = spelt_out(query, keys, values, table, rows, lens, **sizes)
    seen = torch.zeros(len(keys), dtype=torch.bool, device=DEVICE)
    for request, length in enumerate(lens.tolist()):
        first = 0 if window is None else max(length - (window + width - 1), 0)
        positions = torch.arange(first, length, device=DEVICE)
        seen[table[rows[request]][positions // page_size] * page_size + positions % page_size] = True
    keys[~seen], values[~seen] = float("nan"), float("nan")  # P53: what is not seen is not even read
    out = torch.full_like(query, float("nan"))
    paged_attention(query, keys, values, table, rows, lens, out, parts=parts, **sizes)
    assert torch.allclose(out.double(), right, rtol=1e-4, atol=1e-5)


TREE = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", [6, 14])  # one program for a key head, and three
def test_paged_attention_of_a_tree_sees_the_way_to_the_root(parts, window, heads):
    torch.manual_seed(0)
    kv_heads, dim, page_size, pages, width = 2, 20, 4, 50, 5
    keys = random((3 * pages + 1) * page_size, kv_heads, dim)
    values = torch.randn_like(keys)
    table = torch.randperm(3 * pages, device=DEVICE).view(3, pages) + 1
    table = torch.cat([torch.zeros_like(table[:1]), table])
    rows, lens = torch.tensor([2, 1, 3], device=DEVICE), torch.tensor([width, 117, 131], device=DEVICE)
    chain = torch.ones(width, width).tril()
    tree = torch.stack([torch.tensor(TREE).float(), chain, torch.tensor(TREE).float()]).bool().to(DEVICE)
    sizes = {"page_size": page_size, "width": width, "window": window, "tree": tree}
    query, out = (
        random(3 * width, heads, dim),
        torch.full((3 * width, heads, dim), float("nan"), device=DEVICE),
    )
    paged_attention(query, keys, values, table, rows, lens, out, parts=parts, **sizes)
    right = spelt_out(query, keys, values, table, rows, lens, **sizes)
    assert torch.allclose(out.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 8), (7, 1, 20), (16, 1, 6), (34, 2, 80)])
@pytest.mark.parametrize("parts", [1, 3])
def test_paged_attention_takes_heads_of_any_width_in_groups_of_any_size(heads, kv_heads, dim, parts):
    torch.manual_seed(0)
    keys, values = random(40 * 4, kv_heads, dim), random(40 * 4, kv_heads, dim)
    table, rows = torch.arange(40, device=DEVICE).view(2, 20), torch.tensor([1], device=DEVICE)
    query, lens = random(2, heads, dim), torch.tensor([71], device=DEVICE)
    sizes = {"page_size": 4, "width": 2, "window": None}
    out = torch.full_like(query, float("nan"))
    paged_attention(query, keys, values, table, rows, lens, out, parts=parts, **sizes)
    right = spelt_out(query, keys, values, table, rows, lens, **sizes)
    assert torch.allclose(out.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("requests", [1, 2, 16, 64, 256])
def test_parts_fill_the_processors_once_and_never_outnumber_the_blocks(requests):
    parts = parts_for(requests, 8, 132, 65536)
    assert 1 <= parts <= 64
    assert parts == 1 or requests * 8 * parts <= 4 * 132
    assert parts_for(requests, 8, 132, 60) <= 2


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("dim", [1, 16, 80, 128, 256, 512])
def test_blocks_are_what_a_matrix_unit_takes_and_shared_memory_holds(dim, element_size):
    for split in (False, True):
        block = block_for(dim, element_size, split=split)
        assert 16 <= block <= (32 if split else 64) and block & (block - 1) == 0
        assert 4 * block * dim * element_size <= 128 * 1024
    for rows in range(1, 600):
        taken = rows_for(rows, element_size)
        assert 16 <= taken <= 64 and taken & (taken - 1) == 0 and taken < max(2 * rows, 17)


def test_a_head_that_is_too_wide_is_told_with_what_to_do():
    with pytest.raises(InputError, match="at most 512: use the portable ops"):
        block_for(MOST_DIM + 1, 2, split=False)

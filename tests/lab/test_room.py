"""A model and its cache fit in memory, or the error names the sizes that would."""

import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cglab
from cglab.engine.memory import CacheLayout
from cglab.errors import InputError
from cglab.lab import opening
from cglab.lab.room import CacheSizes, cache_bytes, largest, require_room, weight_bytes
from cglab.models.loading import find_model

CONFIG = find_model("pico-gqa").config
WINDOWED = find_model("gemma-31b-like").config


def layout(sizes, window=None):
    return CacheLayout.for_requests(
        sizes.max_batch, sizes.max_context, 16, budget=64, window=window, tokens=sizes.cache_tokens
    )


@given(st.integers(0, 300), st.integers(1, 300))
def test_the_largest_that_fits_is_found(limit, most):
    assert largest(lambda size: size <= limit, most) == min(limit, most)


@given(
    st.integers(1, 64), st.integers(1, 2000), st.none() | st.integers(1, 5000), st.floats(0.05, 0.99),
    st.sampled_from([CONFIG, WINDOWED]),
)  # fmt: skip
def test_the_sizes_that_are_named_fit_and_the_next_do_not(batch, context, tokens, share, config):
    made, asked = partial(layout, window=config.sliding_window), CacheSizes(batch, context, tokens)
    weights = weight_bytes(config, torch.float32)
    free = weights + int(share * cache_bytes(made(asked), config, torch.float32))
    with pytest.raises(InputError) as told:
        require_room(asked, made, config, free=free, dtype=torch.float32)
    assert f"{free:,} bytes are free" in str(told.value) and f"{weights:,} of weights" in str(told.value)
    _, good = str(told.value).split("; ")
    for name, size in re.findall(r"(\w+)=(\d+)", good):
        sizes = {"max_batch": batch, "max_context": context, "cache_tokens": tokens}
        require_room(CacheSizes(**sizes | {name: int(size)}), made, config, free=free, dtype=torch.float32)
        with pytest.raises(InputError):
            require_room(
                CacheSizes(**sizes | {name: int(size) + 1}), made, config, free=free, dtype=torch.float32
            )


def test_what_fits_to_the_byte_is_opened_and_a_system_that_tells_nothing_refuses_nothing():
    asked = CacheSizes(4, 64)
    whole = weight_bytes(CONFIG, torch.float32) + cache_bytes(layout(asked), CONFIG, torch.float32)
    require_room(asked, layout, CONFIG, free=whole, dtype=torch.float32)
    require_room(asked, layout, CONFIG, free=None, dtype=torch.float32)
    with pytest.raises(InputError):
        require_room(asked, layout, CONFIG, free=whole - 1, dtype=torch.float32)


def test_weights_that_leave_no_room_are_told():
    free = weight_bytes(CONFIG, torch.float32)
    with pytest.raises(InputError, match="open a smaller model"):
        require_room(CacheSizes(4, 64), layout, CONFIG, free=free, dtype=torch.float32)


def test_the_bytes_are_those_of_the_tensors_of_a_lab():
    with cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=64) as lab:
        kv = lab.engine.kv
        held = sum(tensor().nbytes for tensor in kv.watched().values())
        found = cache_bytes(layout(CacheSizes(2, 64)), lab.config, torch.float32)
        assert found == held
        stored = sum(parameter.nbytes for parameter in lab.model.parameters())
        assert weight_bytes(lab.config, torch.float32) == pytest.approx(stored, rel=0.001)


@pytest.mark.parametrize("sizes", [{"cache_tokens": 10**8}, {"max_batch": 10**8}])
def test_a_cache_beyond_all_memory_is_refused_before_a_weight_is_loaded(sizes, monkeypatch):
    monkeypatch.setattr(opening, "Lab", None)
    with pytest.raises(InputError, match=rf"bytes are free; the largest that fits: .*{next(iter(sizes))}=\d"):
        cglab.open("pico-gqa", device="cpu", **sizes)

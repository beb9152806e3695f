"""Inputs of a step: what a decode step takes the short way is what the long way gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine import inputs
from cglab.engine.batches import Chunk
from cglab.engine.requests import Request

NAMES = ("input_ids", "positions", "out_slots", "window_out_slots", "seq_lens", "request_rows")


@st.composite
def requests(draw, size):
    ids = st.lists(st.integers(0, 4095), min_size=1, max_size=20)
    prompt, output = draw(ids), draw(st.lists(st.integers(0, 4095), max_size=20))
    count = -(-(len(prompt) + len(output)) // size)
    pages = st.lists(st.integers(0, 99), min_size=count, max_size=count)
    return Request(
        0, prompt, 30, output=output, row=draw(st.integers(1, 9)), pages=draw(pages), window_pages=draw(pages)
    )


@given(st.data(), st.integers(1, 5))
def test_columns_of_single_tokens_equal_those_of_whole_chunks(data, size):
    chunks = []
    for request in data.draw(st.lists(requests(size), min_size=1, max_size=4)):
        position = data.draw(st.integers(0, len(request.prompt) + len(request.output) - 1))
        chunks.append(Chunk(request, position, 1, last=False))
    for name in NAMES[:4]:
        short = inputs._column(name, chunks, size)
        whole = [
            Chunk(each.request, 0, len(each.request.prompt) + len(each.request.output), last=True)
            for each in chunks
        ]
        long = [
            inputs._tokens_column(name, each, size)[chunk.start]
            for each, chunk in zip(whole, chunks, strict=True)
        ]
        assert short.dtype == np.int64 and short.tolist() == long


@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 1, 2)])
def test_a_column_has_one_element_a_token_or_one_a_request(lengths):
    chunks = [
        Chunk(Request(0, [5, 6, 7], 1, row=2, pages=[1], window_pages=[1]), 0, each, last=False)
        for each in lengths
    ]
    for name in NAMES:
        found = inputs._column(name, chunks, 16)
        assert len(found) == (3 if name in ("seq_lens", "request_rows") else sum(lengths))

"""Planted hazards: each function says in a comment which kinds are to be found at which line, and nowhere else."""

import ctypes
import json
import re
import sys
import textwrap

import pytest
import torch

import cglab
from cglab.graphs.breaks import capturing
from cglab.graphs.doctor_findings import ADVICE, EFFECTS

HEAD = """
import ctypes
import random
import time
import numpy as np
import torch
import cglab
import collections
import functools
import itertools
import os
from torch import nn
from torch.nn import functional as F
"""

HAZARDS = {
    "b05 a length is read in a loop": """
        def step(x):
            for _ in range(int(x[0, 0])):  #! HostReadError
                x = x * 2
            return x
        """,
    "b04 a boolean mask": """
        def step(x):
            return x[x > 0].sum()  #! DynamicShapeError
        """,
    "a branch on a tensor": """
        def step(x):
            if (x > 2).any():  #! HostReadError
                return x * 2
            return x + 1
        """,
    "a value on the host, used later": """
        def step(x):
            scale = x.sum().item()  #! HostReadError
            y = x * 2
            return y * scale
        """,
    "nonzero": """
        def step(x):
            return x.nonzero().sum()  #! DynamicShapeError
        """,
    "a list made a tensor": """
        def step(x):
            return x + torch.tensor([1.0, 2.0])  #! NewInputError
        """,
    "an array made a tensor": """
        def step(x):
            bias = torch.from_numpy(np.ones(2, dtype=np.float32))  #! NewInputError
            return x + bias
        """,
    "resize": """
        def step(x):
            return x.clone().resize_(2)  #! UnsupportedOperationError
        """,
    "b06 pinned in the step": """
        staging = torch.ones(2, 2)
        def step(x):
            pinned = staging.pin_memory()  #! UnsupportedOperationError
            return x + pinned
        """,
    "an unpinned copy": """
        table = torch.ones(2, 2)
        def step(x):
            return x + table.to("cuda", non_blocking=True)  #! NewInputError
        """,
    "an unpinned copy by cuda()": """
        table = torch.ones(2, 2)
        def step(x):
            y = x * 2
            return y + table.cuda()  #! NewInputError
        """,
    "a generator of one's own": """
        mine = torch.Generator()
        def step(x):
            noise = torch.rand(2, 2, generator=mine)  #! UnsupportedOperationError
            return x + noise
        """,
    "a generator of one's own, in place": """
        mine = torch.Generator()
        def step(x):
            return x.clone().normal_(generator=mine)  #! UnsupportedOperationError
        """,
    "reseeded": """
        def step(x):
            torch.manual_seed(0)  #! MutatedState
            return x + torch.rand_like(x)
        """,
    "b09 a side stream that is not joined": """
        def step(x):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())  #! UnjoinedStreamError
            with torch.cuda.stream(side):
                y = x * 2
            return x + 1
        """,
    "a foreign stream": """
        def step(x):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):  #! UnjoinedStreamError
                y = x * 2
            return x + 1
        """,
    "a foreign stream is waited for": """
        side = None
        def step(x):
            other = torch.cuda.Stream()
            torch.cuda.current_stream().wait_stream(other)  #! UnjoinedStreamError
            return x + 1
        """,
    "the device is waited for": """
        def step(x):
            y = x * 2
            torch.cuda.synchronize()  #! HostReadError
            return y
        """,
    "an event is waited for": """
        def step(x):
            y = x * 2
            done = torch.cuda.Event()
            done.record()
            done.synchronize()  #! HostReadError
            return y
        """,
    "a stream is waited for": """
        def step(x):
            y = x * 2
            torch.cuda.current_stream().synchronize()  #! HostReadError
            return y
        """,
    "a stream is asked": """
        def step(x):
            y = x * 2
            if torch.cuda.current_stream().query():  #! HostReadError
                y = y + 1
            return y
        """,
    "an event is asked": """
        def step(x):
            y = x * 2
            done = torch.cuda.Event()
            done.record()
            while not done.query():  #! HostReadError
                pass
            return y
        """,
    "a number drawn by Python": """
        def step(x):
            return x * random.random()  #! MutatedState
        """,
    "a number drawn by NumPy": """
        def step(x):
            y = x + 1
            return y * float(np.random.rand())  #! MutatedState
        """,
    "a clock": """
        def step(x):
            return x * time.perf_counter_ns()  #! BakedValue
        """,
    "a value that no operation shows": """
        def step(x):
            first = ctypes.c_float.from_address(x.data_ptr()).value  #! BakedAddress
            return x * first  #! BakedValue
        """,
    "a branch that no operation shows": """
        def step(x):
            first = ctypes.c_float.from_address(x.data_ptr()).value  #! BakedAddress
            if first == 1:
                return x * 2  #! BakedBranch
            return x.add(1)
        """,
    "a shape that no operation shows": """
        def step(x):
            first = ctypes.c_float.from_address(x.data_ptr()).value  #! BakedAddress
            rows = 1 + (first == 1)
            y = x * 3
            return y[:rows]  #! BakedValue
        """,
    "a counter": """
        calls = 0
        def step(x):
            global calls
            calls += 1  #! MutatedState
            return x + 1
        """,
    "a counter in an object that decides": """
        class Step(nn.Module):
            def __init__(self):
                super().__init__()
                self.calls = 0
            def forward(self, x):
                self.calls = 1 - self.calls  #! MutatedState
                if self.calls:
                    return x * 2  #! BakedBranch
                return x + 1
        step = Step()
        """,
    "a counter that scales": """
        class Step:
            calls = 0
            def __call__(self, x):
                y = x * self.calls  #! BakedValue
                self.calls += 1  #! MutatedState
                return y
        step = Step()
        """,
    "a list that grows": """
        seen = []
        def step(x):
            y = x * 2
            seen.append("one")  #! MutatedState
            return y
        """,
    "a list that keeps tensors": """
        seen = []
        def step(x):
            seen.append(x * 2)  #! MutatedState EscapedTensor
            return x + 1
        """,
    "a tensor kept for the next call": """
        class Step(nn.Module):
            def __init__(self):
                super().__init__()
                self.last = torch.zeros(2, 2)
            def forward(self, x):
                y = x + self.last  #! MovedInput
                z = y * 2  #! EscapedTensor
                self.last = z  #! MutatedState
                return y
        step = Step()
        """,
    "an input that is made anew for each call": """
        class Feed:
            def __init__(self):
                self.kept = []
            def next(self):
                self.kept.append(torch.ones(2, 2))
                return self.kept[-1]
        feed = Feed()
        @cglab.eager_break
        def refill():
            state["now"] = feed.next()
        state = {}
        def step(x):
            refill()
            return x + state["now"]  #! MovedInput
        """,
    "an address is read": """
        def step(x):
            address = x.data_ptr()  #! BakedAddress
            return x + address % 2
        """,
    "b01 a cache made by the first call": """
        cache = {}
        def step(x):
            if "table" not in cache:
                cache["table"] = torch.arange(4.0).view(2, 2)  #! LazyInitialisation
            return x + cache["table"]
        """,
    "a first call that only sets up": """
        class Step(nn.Module):
            ready = False
            def forward(self, x):
                if not self.ready:
                    self.scale = torch.ones(2).mul_(3)  #! LazyInitialisation
                    self.ready = True
                return x * self.scale
        step = Step()
        """,
    "a result that cannot be looked into": """
        class Result:
            pass
        def step(x):  #! OutputStructureError
            result = Result()
            result.doubled = x * 2
            return result
        """,
    "a step that does nothing on the device": """
        def step(x):  #! EmptyCaptureError
            return x
        """,
    "a sparse tensor": """
        def step(x):
            return torch.eye(2).to_sparse().to_dense() + x  #! UnsupportedOperationError
        """,
    "a count of distinct values": """
        def step(x):
            return x + torch.unique(x).numel()  #! DynamicShapeError
        """,
    "a boolean mask that is assigned a tensor": """
        def step(x):
            y = x.clone()
            y[y > 2] = x[:1].flatten()[:1].expand(2)  #! DynamicShapeError
            return y
        """,
    "a set that grows": """
        seen = set()
        def step(x):
            y = x * 2
            seen.add(len(seen))  #! MutatedState
            return y
        """,
    "the default dtype": """
        kinds = [torch.float64, torch.float32]
        def step(x):
            y = x * 2
            torch.set_default_dtype(torch.float64 if torch.get_default_dtype() == torch.float32 else torch.float32)  #! MutatedState
            return y
        """,
    "nonzero, by dimension": """
        def step(x):
            rows, _ = x.nonzero(as_tuple=True)  #! DynamicShapeError
            return rows.sum()
        """,
    "the rows that a condition chooses": """
        def step(x):
            rows, _ = torch.where(x > 1)  #! DynamicShapeError
            return rows.sum()
        """,
    "masked_select": """
        def step(x):
            return torch.masked_select(x, x > 1).sum()  #! DynamicShapeError
        """,
    "rows repeated by numbers on the device": """
        def step(x):
            return torch.repeat_interleave(x, x[0].long(), dim=0).sum(0)  #! DynamicShapeError
        """,
    "bincount": """
        def step(x):
            return torch.bincount(x.flatten().long()).sum()  #! DynamicShapeError
        """,
    "a table that lru_cache makes and keeps": """
        @functools.lru_cache
        def table(n):
            return torch.arange(float(n))  #! LazyInitialisation
        def step(x):
            return x + table(2)
        """,
    "an attribute that is another tensor after each call": """
        class Step(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.ones(2)
            def forward(self, x):
                self.w = self.w * 2  #! MutatedState MovedInput EscapedTensor
                return x * self.w
        step = Step()
        """,
    "a parameter with new data": """
        layer = nn.Linear(2, 2)
        def step(x):
            layer.weight.data = layer.weight.data * 2  #! MovedInput EscapedTensor
            return layer(x)
        """,
    "a read in a partial": """
        def scaled(x, by):
            return x * by.item()  #! HostReadError
        step = functools.partial(scaled, by=torch.ones(()))
        """,
    "a read in a lambda": """
        step = lambda x: x + x.max().item()  #! HostReadError
        """,
    "a read deep in a Sequential": """
        class Inner(nn.Module):
            def forward(self, x):
                if x.sum() > 3:  #! HostReadError
                    return x * 2
                return x
        step = nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(2, 2), Inner()))
        """,
    "a read in a hook": """
        step = nn.Linear(2, 2)
        def look(module, args, output):
            return output / output.abs().max().item()  #! HostReadError
        step.register_forward_hook(look)
        """,
    "a hook that counts": """
        step = nn.Linear(2, 2)
        seen = {}
        def look(module, args):
            seen["calls"] = seen.get("calls", 0) + 1  #! MutatedState
        step.register_forward_pre_hook(look)
        """,
    "a value in an f-string": """
        def step(x):
            y = x * 2
            name = f"{y.sum():.2f}"  #! HostReadError
            return y
        """,
    "Python's max of a tensor": """
        def step(x):
            return x * max(x.flatten())  #! HostReadError
        """,
    "a slice up to a tensor": """
        def step(x):
            n = x[0, 0].long()
            return x[:n] + 1  #! HostReadError
        """,
    "one_hot without the number of classes": """
        def step(x):
            return F.one_hot(x.long()).sum()  #! HostReadError
        """,
    "a number from an iterator": """
        count = itertools.count()
        def step(x):
            y = x + 1
            return y * next(count)  #! BakedValue
        """,
    "a counter in the environment": """
        def step(x):
            os.environ["PLANTED"] = str(int(os.environ.get("PLANTED", "0")) + 1)
            return x * int(os.environ["PLANTED"])  #! BakedValue
        """,
}


def planted(tmp_path, source):
    """The function, the file, and the (line, kind) pairs that its comments announce."""
    text = HEAD + textwrap.dedent(source)
    file = tmp_path / "planted.py"
    file.write_text(text)
    scope = {"__name__": "planted"}
    exec(compile(text, str(file), "exec"), scope)
    wanted = {
        (number, kind)
        for number, line in enumerate(text.splitlines(), 1)
        for kind in re.findall(r"\w+", line.partition("#!")[2])
    }
    return scope, str(file), wanted


@pytest.mark.parametrize("name", HAZARDS)
def test_b01_b04_b05_b06_b09_a_planted_hazard_is_found_at_its_line_and_nothing_else(
    tmp_path, monkeypatch, name
):
    monkeypatch.setenv("PLANTED", "0")
    scope, file, wanted = planted(tmp_path, HAZARDS[name])
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    try:
        report = cglab.doctor(scope["step"], x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(each.place.line, each.kind) for each in report.findings} == wanted, str(report)
    assert {each.place.file for each in report.findings} == {file}
    assert all(each.effect and each.advice and each.fact and each.operation for each in report.findings)


CLEAN = {
    "dropout by the default generator": """
        layer = nn.Dropout(0.5)
        def step(x):
            return layer(x)
        """,
    "batch norm in training": """
        step = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        """,
    "attention": """
        step = nn.TransformerEncoderLayer(2, 1, 4, batch_first=True)
        """,
    "a recurrent layer": """
        layer = nn.LSTM(2, 3)
        def step(x):
            y, (h, c) = layer(x)
            return y, h
        """,
    "a cache that is written in place": """
        cache = torch.zeros(8, 2)
        count = torch.zeros((), dtype=torch.int64)
        def step(x):
            cache.index_copy_(0, count + torch.arange(2), x)
            count.add_(2)
            return cache.sum(0)
        """,
    "b09 streams that fork and join": """
        def step(x):
            main, side, third = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                y = x * 2
                third.wait_event(side.record_event())
            with torch.cuda.stream(third):
                z = x + 1
            side.wait_stream(third)
            main.wait_stream(side)
            return y + z
        """,
    "a look that is left out in a capture": """
        def step(x):
            if not torch.cuda.is_current_stream_capturing() and x.isnan().any():
                raise ValueError("no number")
            return x * 2
        """,
    "the device named": """
        def step(x):
            y = x.to("cuda").cuda()
            return y + torch.ones(2, device="cuda") + torch.arange(2.0, device=torch.device("cuda", 0))
        """,
    "all that is forbidden, in a break": """
        class Counter:
            steps = 0
        counter, seen = Counter(), []
        @cglab.eager_break
        def count(x):
            counter.steps += int(x.sum())
            seen.append(x.nonzero())
            torch.cuda.synchronize()
            return torch.from_numpy(np.array([random.random(), float(counter.steps)], dtype=np.float32))
        def step(x):
            return x + count(x * 2)
        """,
    "branches on what never changes": """
        class Step(nn.Module):
            def __init__(self, deep):
                super().__init__()
                self.deep, self.sizes = deep, {"rows": 2, "names": ["a", "b"]}
            def forward(self, x):
                if self.deep and x.shape[0] > 1 and x.dtype == torch.float32:
                    x = x * len(self.sizes["names"])
                return x.view(self.sizes["rows"], -1)
        step = Step(True)
        """,
    "buffers made once, before": """
        class Step(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("table", torch.arange(4.0).view(2, 2))
                self.out = torch.zeros(2, 2)
            def forward(self, x):
                self.out.copy_(x * self.table)
                self.last = self.out
                return self.out
        step = Step()
        """,
    "scalars that stay": """
        scale, bias = 0.5, float("nan")
        def step(x):
            for power in range(3):
                x = x * scale ** power + 1 / (1 + power)
            return torch.nan_to_num(x + bias).clamp(-1.0, max=2)
        """,
    "a fixed share of what a branch would choose": """
        def step(x):
            top = x.flatten().topk(3)
            return torch.where(x > top.values[-1], x, x.new_zeros(())), x.nonzero_static(size=3)
        """,
    "a number where a mask says": """
        def step(x):
            y = x.clone()
            y[y > 2] = 0.0
            return y
        """,
    "a quantile": """
        def step(x):
            return torch.quantile(x, 0.5) + x
        """,
    "a draw by weights": """
        def step(x):
            return torch.multinomial(x, 1) + x
        """,
    "grid_sample": """
        def step(x):
            g = x.view(1,1,2,2)
            return F.grid_sample(x.view(1,1,2,2), g, align_corners=False)
        """,
    "sorted, scattered, summed up": """
        def step(x):
            v, i = x.sort(-1)
            return torch.zeros_like(x).scatter_add_(1, i, v).cumsum(0)
        """,
    "masks by masked_fill and where": """
        def step(x):
            return x.masked_fill(x > 1, 0) + torch.where(x > 1, x, 0)
        """,
    "causal attention by heads": """
        def step(x):
            q = x.view(1,1,2,2)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)
        """,
    "an embedding with padding": """
        table = nn.Embedding(8, 4, padding_idx=0)
        def step(x):
            return table(x.long())
        """,
    "lru_cache of a plain number": """
        @functools.lru_cache
        def size(n):
            return n * 2
        def step(x):
            return x * size(2)
        """,
    "autocast": """
        layer = nn.Linear(2,2)
        def step(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return layer(x)
        """,
    "vmap": """
        def step(x):
            return torch.vmap(lambda r: r * r.sum())(x)
        """,
    "an autograd function": """
        class F2(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 2
            @staticmethod
            def backward(ctx, g):
                return g
        def step(x):
            return F2.apply(x)
        """,
    "a weight that is parametrised": """
        step = nn.utils.parametrizations.weight_norm(nn.Linear(2,2))
        """,
    "a named tuple": """
        Out = collections.namedtuple("Out", "more twice")
        def step(x):
            return Out(x + 1, x * 2)
        """,
    "a convolution and norms": """
        net = nn.Sequential(nn.Conv2d(1,2,1), nn.GroupNorm(1,2), nn.SiLU())
        def step(x):
            return net(x.view(1,1,2,2))
        """,
    "classes that are spread over a known number": """
        def step(x):
            return F.one_hot(x.long(), 8).to(x.dtype) @ F.one_hot(input=x.long(), num_classes=8).to(x.dtype).mT
        """,
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_function_is_healthy(tmp_path, name):
    scope, _, _ = planted(tmp_path, CLEAN[name])
    report = cglab.doctor(scope["step"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert report.healthy and not report.notes, str(report)
    assert report.operations > 0


def test_a_read_in_a_helper_of_another_file_is_told_at_its_line_there(tmp_path):
    helpers = tmp_path / "helpers.py"
    helpers.write_text("def largest(x):\n    y = x + 1\n    return y.numpy().max()\n")
    scope = {}
    exec(compile(helpers.read_text(), str(helpers), "exec"), scope)
    (found,) = cglab.doctor(lambda x: x * scope["largest"](x), torch.ones(2, 2)).findings
    assert (found.kind, found.place.file, found.place.line) == ("HostReadError", str(helpers), 3)


def test_there_are_thirty_hazards_and_ten_clean_functions_and_every_silent_kind_is_planted():
    planted_kinds = {
        kind
        for source in HAZARDS.values()
        for line in source.splitlines()
        for kind in line.partition("#!")[2].split()
    }
    assert len(HAZARDS) >= 30 and len(CLEAN) >= 10
    assert set(ADVICE) <= planted_kinds <= set(EFFECTS)


def test_classes_beyond_the_known_number_fail_in_the_doctor_as_they_would_without_it():
    with pytest.raises(RuntimeError):
        cglab.doctor(lambda x: torch.nn.functional.one_hot(x, 2), torch.tensor([0, 2]))


def test_a_read_in_a_helper_is_found_at_the_line_of_the_helpers_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    helper = tmp_path / "planted_helper.py"
    helper.write_text("def largest(x):\n    return float(x.detach().numpy().max())\n")
    scope, _, _ = planted(
        tmp_path, "import planted_helper\ndef step(x):\n    return x * planted_helper.largest(x)\n"
    )
    (found,) = cglab.doctor(scope["step"], torch.ones(2, 2)).findings
    assert (found.kind, found.place.file, found.place.line) == ("HostReadError", str(helper), 2)


def test_a_report_is_json_with_the_users_line(tmp_path):
    scope, file, wanted = planted(tmp_path, HAZARDS["b04 a boolean mask"])
    value = json.loads(json.dumps(cglab.doctor(scope["step"], torch.ones(2, 2)).as_value()))
    (found,) = value["findings"]
    assert not value["healthy"] and value["notes"] == []
    assert (found["file"], {(found["line"], found["kind"])}) == (file, wanted)
    assert found["function"] == "step" and found["code"].startswith("return x[x > 0]")


def test_a_compiled_region_is_looked_into_and_is_compiled_as_before(tmp_path):
    region = torch.compile(lambda x: (x * 2).relu(), fullgraph=True, backend="eager")
    compiled = torch._dynamo.utils.counters["stats"]

    def step(x):
        y = region(x)
        return y, y.sum().item()

    step(torch.ones(2))
    before = compiled["unique_graphs"]
    report = cglab.doctor(step, torch.ones(2))
    assert [each.kind for each in report.findings] == ["HostReadError"] and report.operations == 4
    step(torch.ones(2))
    assert compiled["unique_graphs"] == before


def test_a_function_that_fails_on_other_values_is_examined_all_the_same_and_says_so():
    seen = []

    def step(x):
        seen.append(1)
        if ctypes.c_float.from_address(x.data_ptr()).value != 1:
            raise ValueError("ones only")
        return x * 2

    report = cglab.doctor(step, torch.ones(2))
    assert {each.kind for each in report.findings} == {"MutatedState", "BakedAddress"}
    assert len(report.notes) == 1 and "ValueError: ones only" in report.notes[0]


def test_inputs_state_and_generators_are_as_before():
    mine, weight = torch.Generator().manual_seed(3), torch.ones(2)
    x = torch.zeros(2)

    def step(x):
        weight.mul_(2)
        x.add_(torch.rand(2, generator=mine) + torch.rand(2))
        return x

    before = (mine.get_state(), torch.get_rng_state())
    report = cglab.doctor(step, x)
    assert [each.kind for each in report.findings] == ["UnsupportedOperationError"]
    assert weight.tolist() == [1, 1] and x.tolist() == [0, 0]
    assert torch.equal(mine.get_state(), before[0]) and torch.equal(torch.get_rng_state(), before[1])


def test_torch_is_left_as_it_was_when_the_function_fails():
    before = {name: getattr(torch.cuda, name) for name in ("Stream", "Event", "stream", "synchronize")}
    tracer = sys.gettrace()

    def step(x):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        cglab.doctor(step, torch.ones(2))
    assert all(getattr(torch.cuda, name) is value for name, value in before.items())
    assert sys.gettrace() is tracer and not capturing()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "b05 a length is read in a loop",
        "b04 a boolean mask",
        "a branch on a tensor",
        "nonzero",
        "b09 a side stream that is not joined",
        "the device is waited for",
        "an unpinned copy",
        "a counter",
        "a list that keeps tensors",
    ],
)
def test_a_planted_hazard_is_found_on_a_gpu_too(tmp_path, name):
    scope, _, wanted = planted(tmp_path, HAZARDS[name])
    report = cglab.doctor(scope["step"], torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="cuda"))
    assert {(each.place.line, each.kind) for each in report.findings} == wanted, str(report)


@pytest.mark.gpu
def test_a_failure_of_a_real_capture_is_explained_after_the_fact():
    event = torch.cuda.Event()

    def step(x):
        y = x * 2
        torch.cuda.current_stream().query()
        event.synchronize()
        return y

    report = cglab.doctor(step, torch.ones(2, device="cuda"))
    assert [each.kind for each in report.findings] == ["HostReadError"]
    assert report.findings[0].place.function == "step"

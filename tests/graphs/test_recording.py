"""What a recording holds, refuses and undoes: the rules of a capture, and the traps of the tape."""

import math
import threading

import numpy as np
import pytest
import torch

import cglab
from cglab.errors import (
    CaptureError,
    DynamicShapeError,
    HostReadError,
    NewInputError,
    SelfCheckError,
    SlotError,
    UnsupportedOperationError,
)  # fmt: skip
from cglab.graphs.options import CaptureFailedWarning
from cglab.graphs.out_forms import out_form, same_bits
from cglab.graphs.recorders import recorder_for
from cglab.graphs.tape import TapeRecorder
from cglab.graphs.writes import WriteJournal

X = {"x": cglab.Slot(pad=0.0)}


def captured_of(function, device="cpu", rows=2, slots=X, **options):
    captured = cglab.capture(function, slots=slots, buckets=(rows,), strict=True, **options)
    captured.warm(x=torch.ones(rows, 4, device=device))
    return captured


def refused(function, error, **options):
    captured = cglab.capture(function, slots=X, buckets=(2,), strict=True, **options)
    with pytest.raises(error) as caught:
        captured(x=torch.randn(2, 4))
    captured.close()
    return caught.value


# What is refused


def test_b04_a_boolean_mask_is_refused_at_the_users_line_with_a_way_out(device):
    def step(x):
        return x[x > 0]

    captured = cglab.capture(step, slots=X, buckets=(2,), strict=True)
    with pytest.raises(DynamicShapeError if device.type == "cpu" else CaptureError) as caught:
        captured(x=torch.ones(2, 4, device=device))
    assert caught.value.place.file == __file__ and caught.value.place.code == "return x[x > 0]"
    if device.type == "cpu":
        assert "fixed size" in caught.value.advice and "eager_break" in caught.value.advice
    assert torch.equal(torch.ones(3, device=device) * 2, torch.full((3,), 2.0, device=device)), "still usable"
    captured.close()


@pytest.mark.parametrize("read", ["item", "tolist"])
def test_b05_a_length_read_on_the_host_is_refused_and_works_as_a_break(device, read):
    def loop(x, lens):
        count = int(lens[0].item()) if read == "item" else lens.tolist()[0]
        total = torch.zeros_like(x)
        for _ in range(count):
            total += x
        return total

    slots = {**X, "lens": cglab.Slot(pad=1)}
    x, lens = torch.ones(2, 4, device=device), torch.tensor([2, 2], device=device)
    captured = cglab.capture(loop, slots=slots, buckets=(2,), strict=True)
    with pytest.raises(HostReadError) as caught:
        captured(x=x, lens=lens)
    assert "count = int(lens[0].item())" in caught.value.place.code
    assert "eager_break" in caught.value.advice
    captured.close()

    @cglab.eager_break
    def live(x, lens, out):
        out.copy_(loop(x, lens))

    def step(x, lens):
        out = torch.empty_like(x)
        live(x * 1, lens, out)
        return out + 0

    with cglab.capture(step, slots=slots, buckets=(2,), backend="breakable", strict=True) as captured:
        for n in (2, 5, 1, 3):
            assert torch.equal(captured(x=x, lens=torch.full((2,), n, device=device)), x * n), (
                "the live length counts"
            )
        assert captured.coverage().captured == 4


def test_b06_pinning_memory_is_refused_with_advice():
    error = refused(lambda x: x + torch.randn(4).pin_memory().sum(), UnsupportedOperationError)
    assert "pin" in error.summary or "pin" in error.operation
    assert error.place.file == __file__ and error.advice


def test_a_tensor_made_from_python_data_is_a_new_input():
    error = refused(lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), NewInputError)
    assert "slot" in error.advice and "(4,)" in error.summary


def test_t8_tags_mislead_integer_indices_and_sized_repeats_are_fine():
    def step(x):
        rows = torch.arange(2, device=x.device).flip(0)
        y = x[rows] + x[:, [1, 0, 3, 2]].repeat_interleave(torch.tensor(1), 0, output_size=2)
        y[0] = 0.0  # a Python number: baked in, and noted
        return y

    with captured_of(lambda x: x[torch.arange(2).flip(0)] + 0) as captured:
        assert captured(x=torch.tensor([[1.0] * 4, [2.0] * 4])).tolist() == [[2] * 4, [1] * 4]
    error = refused(step, NewInputError)
    assert "torch.tensor" in error.operation, "an index list is Python data"


def test_t8_a_python_number_is_baked_in_and_noted():
    recorder = TapeRecorder()
    x = torch.ones(2, 4)
    with recorder.take(recorder.new_pool()) as take:
        y = x * 2
        y[0] = 3.0
        take.cut()
    assert sum(take.notes.values()) == 1 and y[0, 0] == 3


def test_t9_reads_that_no_dispatch_mode_sees_are_refused_in_the_warm_up():
    reads = {
        "tolist": lambda x: x * x.tolist()[0][0],
        "numpy": lambda x: x * float(x.numpy()[0, 0]),
        "asarray": lambda x: x * float(np.asarray(x)[0, 0]),
        "dlpack": lambda x: x * float(np.from_dlpack(x)[0, 0]),
        "repr": lambda x: x * len(repr(x)),
    }
    for name, function in reads.items():
        error = refused(function, HostReadError)
        assert error.place.file == __file__, name


def test_t9_the_watch_does_not_change_what_is_recorded():
    """A function mode makes an encoder layer leave its fast path, so it must not be there while recording."""
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with cglab.capture(lambda x: layer(x), slots=X, buckets=(2,), strict=True) as captured:
        captured.warm(x=x)
        with torch.no_grad():
            assert same_bits(captured(x=x), layer(x))


def test_t10_a_numpy_alias_is_caught_by_the_self_check():
    table = torch.ones(4)
    alias = table.numpy()

    def step(x):
        np.add(alias, 1, out=alias)
        return x + table

    error = refused(step, SelfCheckError)
    assert "numpy views, Python lists and counters" in error.advice


def test_t10_a_python_counter_is_caught_by_the_self_check():
    count = [0]

    def step(x):
        count[0] += 1
        return x * count[0]

    refused(step, SelfCheckError)


def test_t10_work_in_another_thread_is_caught_by_the_self_check():
    def step(x):
        out = torch.zeros_like(x)
        worker = threading.Thread(target=lambda: out.copy_(x * 2))
        worker.start()
        worker.join()
        return out + 1

    refused(step, (SelfCheckError, CaptureError))


def test_the_self_check_can_be_switched_off_and_then_lies():
    count = [0]

    def step(x):
        count[0] += 1
        return x * count[0]

    with captured_of(step, self_check=False) as captured:
        assert captured.captured_sizes == [2], "which is why it is on"


def test_p37_a_python_branch_on_the_inputs_size_is_per_bucket():
    def step(x):
        return x * 2 if x.shape[0] > 2 else x * 3

    with cglab.capture(step, slots=X, buckets=(2, 4), strict=True) as captured:
        assert captured(x=torch.ones(2, 4)).tolist() == [[3] * 4] * 2
        assert captured(x=torch.ones(3, 4)).tolist() == [[2] * 4] * 3, "as the bucket of four computes"


@pytest.mark.parametrize("value", ["nested", "meta"])
def test_t6_odd_tensors_get_a_clean_refusal(value):
    if value == "nested":
        inside = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        function = lambda x: x + inside.to_padded_tensor(0.0).sum()  # noqa: E731
    else:
        function = lambda x: x + torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()  # noqa: E731
    error = refused(function, UnsupportedOperationError)
    assert "no fixed memory" in error.summary and error.place.file == __file__


def test_t6_zero_elements_and_inference_mode():
    with torch.inference_mode(), captured_of(lambda x: torch.cat([x, x[:, :0]], 1) * 2) as captured:
        assert captured(x=torch.ones(2, 4)).tolist() == [[2] * 4] * 2
    with captured_of(lambda x: x * 2) as captured:
        with torch.inference_mode():
            x = torch.ones(2, 4)
        assert captured(x=x).tolist() == [[2] * 4] * 2, "an inference tensor is copied in"
        captured._captured.buffers.view(2)["x"].fill_(1)


# What is recorded


def test_t1_reshape_contiguous_and_to_are_not_taken_for_aliases():
    """Their schemas declare an alias even where they copy: a replay must compute the copy again."""

    def step(x):
        y = x.view(2, 2, 2).transpose(1, 2)
        return y.reshape(2, 4) + y.contiguous().view(2, 4) + x.to(torch.float64).to(torch.float32)

    with captured_of(step) as captured:
        for scale in (1.0, 5.0):
            x = torch.arange(8.0).view(2, 4) * scale
            assert torch.equal(captured(x=x), step(x))


def test_t1_replay_runs_under_the_grad_mode_of_the_capture():
    seen = []
    linear = torch.nn.Linear(4, 4)
    watched = cglab.eager_break(lambda x: seen.append(torch.is_grad_enabled()))

    def step(x):
        y = linear(x)
        watched(y)
        return y + 0

    with captured_of(step, backend="breakable") as captured, torch.enable_grad():
        out = captured(x=torch.ones(2, 4))
        assert not out.requires_grad
        with torch.no_grad():
            assert same_bits(out, linear(torch.ones(2, 4)))


def test_t2_a_view_is_told_from_a_copy_by_its_storage():
    with captured_of(lambda x: x.t().t().add(0).view(-1).view(2, 4)[:, 1:] * 1) as captured:
        names = captured.inspect(2)
    assert names == ["aten::add", "aten::mul", "aten::copy_"], "views are no operations"


def test_t3_out_forms_are_used_only_where_they_write_the_same_bits():
    x = torch.randn(4, 8)
    values, indices = torch.empty(4, 3), torch.empty(4, 3, dtype=torch.int64)
    result = torch.ops.aten.topk.default(x, 3)
    values.copy_(result[0])
    indices.copy_(result[1])
    form = out_form(torch.ops.aten.topk.default, (x, 3), {}, [values, indices], [values, indices])
    assert form is not None and form.names == ("values", "indices")
    assert same_bits(values, result[0]) and same_bits(indices, result[1]), (
        "the trial left the results in place"
    )
    strided = torch.empty(8, 4).t()
    assert out_form(torch.ops.aten.rand_like.default, (x,), {}, [strided], [strided]) is None, (
        "random: never tried"
    )


def test_t3_a_random_operation_draws_once_at_capture_as_in_eager():
    """The tape executes while it captures: the generator must stand where the same eager runs leave it."""
    recorder = TapeRecorder()
    torch.default_generator.manual_seed(5)
    with recorder.take(recorder.new_pool()) as take:
        torch.rand(2, 4)
        take.cut()
    after = torch.get_rng_state()
    torch.default_generator.manual_seed(5)
    torch.rand(2, 4)
    assert torch.equal(torch.get_rng_state(), after)


def test_p28_a_capture_leaves_the_random_generator_where_it_was(device):
    """The first call captures: under the same seed it must draw what eager draws."""

    def step(x):
        return x + torch.rand_like(x)

    x = torch.ones(2, 4, device=device)
    torch.manual_seed(5)
    expected = step(x), step(x)
    with cglab.capture(step, slots=X, buckets=(1, 2, 4), strict=True, padding=False) as captured:
        torch.manual_seed(5)
        first = captured(x=x).clone()
        assert torch.equal(first, expected[0]) and torch.equal(captured(x=x), expected[1])
        assert captured.coverage().captured == 2


def test_t3_what_has_no_out_form_is_copied_and_counted():
    def step(x):
        h = x.view(1, 2, 2, 2)
        return torch.nn.functional.scaled_dot_product_attention(h, h, h).view(2, 4)

    with captured_of(step) as captured:
        assert any(name.endswith("(copied)") for name in captured.inspect(2))
    with captured_of(lambda x: x.exp()) as captured:
        assert captured.inspect(2) == ["aten::exp", "aten::copy_"]


def test_t4_random_operations_follow_the_seed_at_every_replay():
    def step(x):
        return torch.nn.functional.dropout(x, 0.5, training=True)

    with captured_of(step) as captured:

        def draw(seed):
            torch.default_generator.manual_seed(seed)
            return [captured(x=torch.ones(2, 4)).clone() for _ in range(3)]

        first, again, other = draw(1), draw(1), draw(2)
        torch.default_generator.manual_seed(1)
        eager = [step(torch.ones(2, 4)) for _ in range(3)]
    assert all(map(torch.equal, first, again)) and all(map(torch.equal, first, eager))
    assert not all(map(torch.equal, first, other))
    assert not torch.equal(first[0], first[1]) or not torch.equal(first[1], first[2])


def test_t4_a_generator_of_the_users_own_is_followed():
    generator = torch.Generator().manual_seed(1)
    captured = captured_of(lambda x: x + torch.rand(x.shape, generator=generator), self_check=False)
    generator.manual_seed(9)
    got = captured(x=torch.zeros(2, 4))
    generator.manual_seed(9)
    assert torch.equal(got, torch.rand(2, 4, generator=generator))
    captured.close()


def test_t5_p28_p43_a_capture_leaves_no_trace_in_outside_memory(device):
    """Warm-ups and (on the tape) the recording execute: state that they change is put back."""
    counter = torch.zeros(1, device=device)
    cache = torch.zeros(6, 4, device=device)

    def step(x, slot):
        counter.add_(1)
        cache.index_copy_(0, slot, x)
        return cache.index_select(0, slot) + counter

    slots = {**X, "slot": cglab.Slot(pad=0)}
    before = cache.clone()

    def undo():
        counter.zero_()
        cache.copy_(before)

    x, slot = torch.ones(2, 4, device=device), torch.tensor([2, 3], device=device)
    options = {} if device.type == "cpu" else {"after_warmup": undo}
    with cglab.capture(step, slots=slots, buckets=(2, 4), strict=True, **options) as captured:
        captured.warm(x=x, slot=slot)
        assert counter.item() == 0 and torch.equal(cache, before)
        for n in (1, 2, 3):
            assert torch.equal(captured(x=x, slot=slot), x + n), "one step a replay"


def test_t5_what_a_break_writes_during_a_tape_capture_is_undone_too():
    counter, cache = torch.zeros(1), torch.zeros(4, 4)

    @cglab.eager_break
    def count(h):
        counter.add_(1)
        cache[:2].add_(h)

    def step(x):
        h = x * 2
        count(h)
        return h + counter

    with captured_of(step, backend="breakable") as captured:
        assert counter.item() == 0 and not cache.any()
        assert captured(x=torch.ones(2, 4)).tolist() == [[3] * 4] * 2 and cache.sum() == 16


def test_p28_b15_a_failed_capture_leaves_the_random_generator_where_it_was(device):
    """What was drawn before the failure is drawn again by the eager steps after it."""

    def step(x):
        torch.rand_like(x)
        raise ValueError("halfway")

    torch.manual_seed(11)
    expected = torch.rand(4, device=device)
    torch.manual_seed(11)
    with cglab.capture(step, slots=X, buckets=(2,), strict=True) as captured:
        with pytest.raises(CaptureError):
            captured.warm(x=torch.ones(2, 4, device=device))
    assert torch.equal(torch.rand(4, device=device), expected)


def test_p28_two_warm_ups_for_the_first_shape_one_for_the_next_and_the_hook_after_each(device):
    runs, undone = [], []

    def step(x):
        runs.append(x.shape[0])
        return x * 2

    captured = cglab.capture(
        step, slots=X, buckets=(2, 4, 8), self_check=False, after_warmup=lambda: undone.append(len(runs))
    )
    captured(x=torch.ones(2, 4, device=device))
    warmups = {line["bucket"]: line["warmups"] for line in captured.memory()}
    if device.type == "cpu":
        assert warmups == {"8": 2, "4": 1, "2": 1}
    assert warmups["8"] == 2 and len(undone) == sum(warmups.values())
    captured.close()
    fixed = cglab.capture(step, slots=X, buckets=(2, 4), warmups=2)
    fixed(x=torch.ones(2, 4, device=device))
    assert [line["warmups"] for line in fixed.memory()] == [2, 2], "a setting restores two everywhere"
    fixed.close()


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_b01_a_capture_that_fails_without_a_warm_up_says_that_warm_ups_are_off(device, backend):
    def step(x):
        return x * x.sum().item()

    said = {}
    for warmups in (0, None):
        with cglab.capture(
            step, slots=X, buckets=(2,), backend=backend, warmups=warmups, strict=True
        ) as captured:
            with pytest.raises(HostReadError) as told:
                captured.warm(x=torch.ones(2, 4, device=device))
        said[warmups] = str(told.value)
        assert "x.sum().item()" in said[warmups] and "@cglab.eager_break" in said[warmups]
    assert "warmups=0" in said[0] and "warm-up" not in said[None]


def test_b02_a_per_stream_cache_misses_in_the_warm_up_and_never_in_the_capture(device):
    """As a library handle: made on the first use of a stream, which must be the warm-up's and the capture's."""
    cache, misses = {}, []

    def step(x):
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        if stream not in cache:
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            misses.append(capturing)
            cache[stream] = True
        return x * 2

    recorder = recorder_for(device)
    x = torch.ones(2, device=device)
    recorder.warm_up(lambda: step(x))
    with recorder.take(recorder.new_pool()) as take:
        step(x)
        take.cut()
    assert misses == [False]


def test_b02_a_tape_capture_tells_a_step_that_allocates_on_a_miss():
    """On the tape the same fault is a step that records one operation more than its warm-up ran."""
    cache = {}

    def step(x):
        if "workspace" not in cache:
            cache["workspace"] = torch.zeros(4)
        return x + cache["workspace"]

    with captured_of(step) as captured:
        assert captured.inspect(2) == ["aten::add", "aten::copy_"], "the allocation happened in the warm-up"


def test_p30_freeing_tensors_during_the_capture_is_harmless(device):
    """Blocks of dead intermediates are used again; none is read after it was given to another."""

    def step(x):
        for i in range(20):
            y = x * float(i)
            x = x + y
            del y
        return x

    x = torch.ones(2, 4, device=device)
    with captured_of(step, device) as captured:
        assert torch.equal(captured(x=x), step(x)) and torch.equal(captured(x=x * 3), step(x * 3))


@pytest.mark.parametrize("poison", [False, True])
def test_p30_dead_blocks_filled_with_nan_are_never_read(poison):
    from cglab.graphs.backends import Full
    from cglab.graphs.keys import ShapeKey
    from cglab.graphs.tape_pool import TapePool

    x = torch.arange(1.0, 9.0)

    def step():
        y = x
        for _ in range(10):
            y = (y * 1.5 - y.mean()).tanh() + y
        return y

    backend = Full(TapeRecorder(), TapePool(poison=poison))
    with backend.capture_session():
        backend.capture_one(ShapeKey(8), step)
    x.mul_(2)
    assert same_bits(backend.replay(ShapeKey(8)).tree(), step())
    assert backend.pool.used_bytes == 0, "every intermediate is dead; the output has a buffer of its own"
    backend.close()


def test_t_an_escaped_intermediate_is_what_replay_writes():
    """``self.h = h``: Python holds the very memory that a replay writes, and holding it keeps it from others."""
    recorder = TapeRecorder()
    pool, x = recorder.new_pool(), torch.ones(2, 4)
    with recorder.take(pool) as take:
        kept = x * 2
        result = kept + 1
        del result
        other = x * 5
        segment = take.cut()
    x.fill_(7)
    segment.replay()
    assert torch.equal(kept, torch.full((2, 4), 14.0)) and torch.equal(other, torch.full((2, 4), 35.0))
    assert pool.used_bytes == 2 * 64


def test_t12_a_compiled_function_is_recorded_in_its_portable_form():
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    with captured_of(lambda x: compiled(x) * 2) as captured:
        assert torch.allclose(captured(x=torch.ones(2, 4)), torch.full((2, 4), (math.sin(1) + 1) * 2))


def test_t12_collectives_that_return_a_handle_are_refused(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:

        def step(x):
            y = x * 2
            dist.all_reduce(y)
            return y

        error = refused(step, UnsupportedOperationError)
        assert "handle" in error.summary and "functional_collectives" in error.advice
    finally:
        dist.destroy_process_group()


def test_t7_the_library_itself_reads_no_tensor_on_the_host(monkeypatch):
    """Every CPU tensor looks like a device tensor to the tape: a replay of the lab's own must not read one."""
    with captured_of(lambda x: x * 2) as captured:
        x = torch.ones(1, 4)

        def refuse(*_, **__):
            raise AssertionError("read on the host")

        for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        out = captured(x=x)
        monkeypatch.undo()
        assert torch.equal(out, x * 2)


# What is undone


def test_the_journal_puts_back_every_written_storage_once():
    a, b = torch.zeros(4), torch.zeros(2, dtype=torch.int64)
    with WriteJournal().recording() as journal:
        a[:2].add_(1)
        a.view(2, 2)[1].mul_(3).add_(5)
        b.fill_(7)
        torch.zeros(3).add_(1)
        torch._foreach_add_([a, b], 1)
        assert len(journal.storages) == 2, "temporaries are no state"
    assert a.tolist() == [0] * 4 and b.tolist() == [0] * 2


def test_the_journal_puts_back_on_an_error_too():
    a = torch.zeros(4)
    with pytest.raises(ValueError, match="stop"), WriteJournal().recording():
        a.add_(1)
        raise ValueError("stop")
    assert a.tolist() == [0] * 4


def test_n01_a_failed_capture_holds_no_tensor_of_the_failed_frame():
    import gc
    import weakref

    holder = []

    def step(x):
        big = torch.zeros(1000, 1000)
        holder.append(weakref.ref(big))
        if len(holder) > 3:
            raise ValueError("while recording")
        return x + big[0, 0]

    captured = cglab.capture(step, slots=X, buckets=(2,), strict=True)
    with pytest.raises(CaptureError) as caught:
        captured(x=torch.ones(2, 4))
    gc.collect()
    assert holder[-1]() is None, "although the error is still held"
    assert "while recording" in str(caught.value)
    captured.close()


def test_a_failed_capture_is_a_warning_that_names_the_line_unless_strict():
    def step(x):
        return x * x.sum().item()

    captured = cglab.capture(step, slots=X, buckets=(2, 4))
    with pytest.warns(
        CaptureFailedWarning, match=r"test_recording.py:\d+ in step: return x \* x.sum\(\).item\(\)"
    ):
        out = captured(x=torch.ones(2, 4))
    assert torch.equal(out, torch.full((2, 4), 8.0))
    assert captured.coverage().reasons == {"CAPTURE_FAILED": 1} and set(captured.failures) == {"2", "4"}
    captured.close()


def test_a_missing_input_is_refused_by_name():
    captured = cglab.capture(lambda x, y: x + y, slots={**X, "y": cglab.Slot(pad=0.0)}, buckets=(2,))
    with pytest.raises(SlotError, match="'y'"):
        captured(x=torch.ones(2, 4))
    captured.close()


def test_lazily_conjugated_and_negated_views_are_recorded_as_they_are_seen(device):
    def step(x):
        return (x * 2).conj() + 1, (x * 2).conj().imag * 3

    with cglab.capture(step, slots={"x": cglab.Slot()}, buckets=(2,), strict=True) as captured:
        for x in (torch.tensor([1j, 2j], device=device), torch.tensor([3.0, 4j], device=device)):
            for got, want in zip(captured(x=x), step(x), strict=True):
                assert torch.equal(got, want)


def test_a_step_that_returns_the_state_it_writes_passes_the_self_check(device):
    state = torch.zeros(2, device=device)
    with cglab.capture(
        lambda x: state.add_(x), slots={"x": cglab.Slot()}, buckets=(2,), strict=True, self_check=True,
        after_warmup=state.zero_,
    ) as captured:  # fmt: skip
        for count in (1, 2, 3):
            assert captured(x=torch.ones(2, device=device)).tolist() == [count] * 2
    assert state.tolist() == [3, 3]

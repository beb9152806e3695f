"""The hand-written kernels compile for a GPU, where there is none: Triton's interpreter allows more than its compiler."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton here: it comes with torch for CUDA")

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]

SHARED_BYTES = 227 * 1024
"""Most shared memory of a program on capability 9.0, by the CUDA programming guide."""
LARGE = {"_part": ("keys", "values"), "_turn": ("keys", "values"), "_one": ("weight",), "_few": ("weight",)}
"""Arguments that may have more elements than 32 bits count."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, environment):
    """What the process found, with a cache of its own, so that nothing was compiled before."""
    cache = tmp_path_factory.mktemp("kernels")
    own = environment | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    script = Path(__file__).with_name("ahead_of_time.py")
    done = subprocess.run([sys.executable, script], env=own, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "missing" in found:
        pytest.skip(found["missing"])
    return found


def made(compiled):
    return [kernel for result in compiled["results"] for kernel in result["made"]]


def test_every_launch_compiles_down_to_the_device_s_own_code(compiled):
    wrong = [f"{result['call']}: {result['error']}" for result in compiled["results"] if result["error"]]
    assert not wrong, "\n".join(wrong)
    assert all({"ptx", "cubin"} <= set(kernel["forms"]) for kernel in made(compiled))


def test_every_kernel_of_the_package_is_among_them(compiled):
    assert compiled["found"], "the package has kernels"
    assert compiled["reached"] == compiled["found"], "a new kernel needs a case in ahead_of_time.py"
    assert set(LARGE) <= {kernel["kernel"] for kernel in made(compiled)}


def test_no_program_needs_more_shared_memory_than_a_processor_has(compiled):
    much = [
        (kernel["kernel"], kernel["shared"]) for kernel in made(compiled) if kernel["shared"] > SHARED_BYTES
    ]
    assert not much
    assert all(extent <= 65535 for kernel in made(compiled) for extent in kernel["grid"][1:])


def widths_of(ttir, argument):
    """Bits of the offsets that are added to a pointer argument, and to what is derived from it."""
    derived, widths = {f"%{argument}"}, set()
    for line in ttir.splitlines():
        step = re.search(r"(%\w+) = tt\.(splat|broadcast|expand_dims|addptr) (%\w+)", line)
        if step and step[3] in derived:
            derived.add(step[1])
            if step[2] == "addptr":
                widths.add(int(re.search(r", (?:tensor<[\dx]*)?i(\d+)>?", line.split(" : ", 1)[1])[1]))
    return widths


def test_places_in_a_large_cache_or_matrix_are_counted_in_64_bits(compiled):
    for kernel in made(compiled):
        for argument in LARGE.get(kernel["kernel"], ()):
            assert 64 in widths_of(kernel["ttir"], argument), (kernel["kernel"], argument)

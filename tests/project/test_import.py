"""``import cglab`` is cheap, touches no device and loads nothing that only notebooks need."""

import subprocess
import sys

import pytest

import cglab

HEAVY = {"ipywidgets", "pandas", "plotly", "transformers"}

PROBE = """
import sys, time
import torch

def touched(*_, **__):
    raise SystemExit("a device was touched")

torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = touched
before = set(sys.modules)
start = time.perf_counter()
import cglab
import_seconds = time.perf_counter() - start
for name in {names!r}:
    getattr(cglab, name)
{also}
print(import_seconds, *sorted({{module.partition(".")[0] for module in set(sys.modules) - before}}))
"""


def probe(names: list[str], also: str = "") -> tuple[float, set[str]]:
    """Seconds of the import and the top-level modules that it and the use of the names loaded."""
    code = PROBE.format(names=names, also=also)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    seconds, *modules = run.stdout.split()
    return float(seconds), set(modules)


def test_import_is_fast_and_pure():
    seconds, modules = probe([])
    assert seconds < 1
    assert "cglab" in modules
    assert not modules & HEAVY


def test_import_does_not_even_load_torch():
    code = "import sys, cglab, cglab.settings, cglab.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_using_every_public_name_is_pure_too():
    _, modules = probe(cglab.__all__)
    assert not modules & HEAVY


def test_the_probe_sees_a_heavy_import_and_a_touched_device():
    assert "pandas" in probe([], also="import pandas")[1]
    with pytest.raises(AssertionError, match="a device was touched"):
        probe([], also="torch.cuda.is_available()")


def test_all_is_sorted_and_complete():
    assert cglab.__all__ == sorted(cglab.__all__)
    assert set(cglab.__all__) == {*cglab._HOMES, "__version__"}
    assert dir(cglab) == cglab.__all__


@pytest.mark.parametrize("name", cglab.__all__)
def test_public_name_resolves_and_stays_the_same_object(name):
    assert getattr(cglab, name) is getattr(cglab, name)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'captrue'"):
        cglab.captrue  # noqa: B018

"""``import cglab`` is cheap, touches no device and loads nothing that only notebooks need."""

import subprocess
import sys

import pytest

import cglab

HEAVY = {"ipywidgets", "pandas", "plotly", "transformers"}

PROBE = """
import sys
import torch

def touched(*_, **__):
    raise SystemExit("a device was touched")

torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = touched
before = set(sys.modules)
import cglab
for name in {names!r}:
    getattr(cglab, name)
{also}
print(*sorted(set(sys.modules) - before))
"""


@pytest.fixture
def python(environment):
    """Runs code in an interpreter of its own."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run


@pytest.fixture
def probe(python):
    """The modules that the import and the use of these names load."""

    def run(names: list[str], also: str = "") -> set[str]:
        done = python(PROBE.format(names=names, also=also))
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split())

    return run


def packages(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_import_is_fast_as_it_loads_nothing_but_itself(probe):
    """What it takes on which machine is nobody's promise; that next to nothing is loaded is."""
    modules = probe([])
    assert {module for module in modules if module.startswith("cglab")} == {"cglab"}
    assert packages(modules) - {"cglab"} <= sys.stdlib_module_names


def test_import_does_not_even_load_torch(python):
    code = "import sys, cglab, cglab.settings, cglab.errors; sys.exit('torch' in sys.modules)"
    assert python(code).returncode == 0


def test_using_every_public_name_is_pure_too(probe):
    assert not packages(probe(cglab.__all__)) & HEAVY


def test_the_probe_sees_a_heavy_import_and_a_touched_device(probe):
    assert "pandas" in probe([], also="import pandas")
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

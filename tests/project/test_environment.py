"""environment.yml adds nothing of its own: conda provides Python, pyproject.toml the rest.

Parsed and compared only. Solving it needs conda and its channels, which this does not run; the pip line is
what `make` installs, with the `dev` extra in place of `sglang`.
"""

import re
import tomllib
from importlib.metadata import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rattler import MatchSpec
from rattler.exceptions import InvalidMatchSpecError

DESIGN_CARD = {"torch", "jupyterlab", "ipywidgets", "sglang", "pandas", "plotly", "nbval"}


@pytest.fixture(scope="module")
def project(root):
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def environment(root):
    return yaml.safe_load((root / "environment.yml").read_text())


@pytest.fixture(scope="module")
def pins(root):
    lines = (root / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def requirements(*groups):
    return [Requirement(line) for group in groups for line in group]


def test_every_conda_spec_parses(environment):
    specs = [spec for spec in environment["dependencies"] if isinstance(spec, str)]
    assert [str(MatchSpec(spec).name.normalized) for spec in specs] == ["python", "pip"]
    assert environment["channels"] == ["conda-forge"]
    with pytest.raises(InvalidMatchSpecError):
        MatchSpec("python=>>3.11")


def test_python_is_one_version_everywhere(root, project, environment):
    (python,) = [spec for spec in environment["dependencies"] if str(spec).startswith("python=")]
    version = python.partition("=")[2]
    assert SpecifierSet(project["requires-python"]) == SpecifierSet(f">={version}")
    assert f"on Python {version}," in (root / "constraints.txt").read_text()
    assert f"PYTHON ?= python{version} " in (root / "Makefile").read_text()
    assert f"python{version} -c" in (root / ".ci" / "run").read_text()


def test_what_is_pinned_runs_on_every_python_of_the_range(project, pins):
    """Debian's 3.11.2 is one of them: a release that wants a later patch cannot be installed there."""
    first = f"{project['requires-python'].removeprefix('>=')}.0"
    refused = {
        f"{name}=={version}": asked for name, version in pins.items()
        if (asked := metadata(name).get("Requires-Python")) and first not in SpecifierSet(asked)
    }  # fmt: skip
    assert not refused, "pin an older release (scripts/lock.py writes what is installed)"


def test_pip_section_is_exactly_the_project_with_its_extra(environment, project):
    (section,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert section == ["-e .[sglang]"]
    assert "sglang" in project["optional-dependencies"]


def test_ci_installs_the_browser_that_drives_the_workspace_and_a_font(root, project):
    script = (root / ".ci" / "run").read_text()
    assert "command -v chromium " in script and "chromium fonts-" in script
    assert "playwright" in {each.name for each in requirements(project["optional-dependencies"]["dev"])}


def test_every_package_of_the_design_card_is_declared(project):
    declared = requirements(project["dependencies"], project["optional-dependencies"]["sglang"])
    assert {requirement.name for requirement in declared} >= DESIGN_CARD


def test_lock_pins_all_that_is_declared_within_its_range(project, pins):
    """But Triton: torch for CUDA asks for one version of it, which a pin would contradict."""
    declared = requirements(project["dependencies"], project["optional-dependencies"]["dev"])
    for requirement in (each for each in declared if each.name != "triton"):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert requirement.specifier.contains(Version(pins[name])), requirement


def test_lock_keeps_a_cpu_install_free_of_cuda_and_servers(pins):
    assert pins["torch"] == "2.13.0"
    assert not [name for name in pins if name.startswith(("nvidia-", "cuda-", "triton", "sglang"))]


def test_torch_range_is_the_one_the_library_runs_on(project):
    (torch,) = [need for need in requirements(project["dependencies"]) if need.name == "torch"]
    inside = ["2.11.0", "2.13.0", "2.14.1"]
    assert list(torch.specifier.filter(["2.10.1", *inside, "2.15.0"])) == inside

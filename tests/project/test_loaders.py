"""What is read from outside runs no code and stays in its folder, and nobody listens to other machines: the source says so."""

import ast
import json
import warnings

import pytest

from tests.project.test_tree import tracked

UNPICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
}
CODE = {"eval", "exec", "os.system", "os.popen", "torch.hub.load", "torch.serialization.add_safe_globals"}
UNSAFE_YAML = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"}
EVERY_INTERFACE = "0.0" + ".0.0"


def of_call(call: ast.Call) -> str | None:
    """Why a call is refused."""
    name, last = ast.unparse(call.func), ast.unparse(call.func).rpartition(".")[2]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    for switch, safe in (
        ("trust_remote_code", "False"),
        ("allow_pickle", "False"),
        ("weights_only", "True"),
        ("shell", "False"),
    ):
        if given.get(switch, safe) != safe:
            return f"{switch}={given[switch]}"
    if name in CODE:
        return f"{name} runs what it is given"
    if name == "torch.load" and "weights_only" not in given:
        return "torch.load unpickles"
    if name in UNSAFE_YAML and "SafeLoader" not in ast.unparse(call):
        return f"{name} makes any object"
    if last in ("extractall", "extract", "unpack_archive") and given.get("filter") != "'data'":
        return f"{last} without filter='data' writes where the archive says"
    return None


def offences(source: str) -> list[str]:
    """What in this source unpickles, runs foreign code, leaves a folder or listens to other machines."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(source)
    for node in ast.walk(tree):
        told = None
        if isinstance(node, ast.Import):
            told = next(
                (f"imports {each.name}" for each in node.names if each.name.split(".")[0] in UNPICKLERS), None
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLERS:
            told = f"imports {node.module}"
        elif isinstance(node, ast.Call):
            told = of_call(node)
        elif isinstance(node, ast.Constant) and node.value == EVERY_INTERFACE:
            told = f"the address {node.value!r} is open to other machines"
        if told is not None:
            found.append(f"line {node.lineno}: {told}")
    return found


def cells(text: str) -> str:
    """The code of a notebook; what is no Python in it, a magic or a shell's line, becomes a comment."""
    sources = ("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    lines = "\n".join(sources).splitlines()
    return "\n".join("pass  #" + line if line.lstrip().startswith(("%", "!")) else line for line in lines)


def test_neither_the_package_nor_a_script_nor_a_notebook_reads_what_could_run_or_escape(root):
    files = tracked(root, "cglab/*.py", "scripts/*.py", "conftest.py", "notebooks/*.ipynb")
    assert len(files) > 200, "the source was found"
    found = {}
    for path in files:
        text = path.read_text()
        if told := offences(cells(text) if path.suffix == ".ipynb" else text):
            found[str(path.relative_to(root))] = told
    assert found == {}


def test_no_cell_of_a_notebook_asks_a_shell(root):
    for path in tracked(root, "notebooks/*.ipynb"):
        assert not [line for line in cells(path.read_text()).splitlines() if line.startswith("pass  #!")], (
            path
        )


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch, dill",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=trust)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "tarfile.open(path).extractall(folder)",
        "archive.extract(member, folder, filter='fully_trusted')",
        "shutil.unpack_archive(path, folder)",
        "subprocess.run(line, shell=True)",
        "eval(text)",
        "os.system(line)",
        f"serve(host={EVERY_INTERFACE!r})",
    ],
)
def test_the_search_finds_a_planted_one(source):
    (told,) = offences(f"'''A module.'''\n{source}\n")
    assert told.startswith("line 2: ")


def test_the_search_lets_pass_what_is_safe():
    safe = [
        "torch.load(path, weights_only=True)", "numpy.load(path)", "yaml.safe_load(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)", "tar.extractall(folder, filter='data')", "json.load(file)",
        "model.eval()", "subprocess.run(words, shell=False)", "AutoModel.from_pretrained(name, trust_remote_code=False)",
        "spec.loader.exec_module(module)", "serve(host='127.0.0.1')",
    ]  # fmt: skip
    assert offences("\n".join(safe)) == []

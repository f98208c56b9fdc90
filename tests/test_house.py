"""The house: who may import whom, what is public, how large a function may be. Read from the syntax trees.

When one of these fails, the code is to be changed, not the number here; a new file of the core gets its place in `ORDER`. The
library is imported inside the few tests that need it, so that the others also speak when it cannot be imported.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "ignite_train").is_dir(), reason="looks at a checkout, and this is none")

# Every file of the core. Each may import those above it, and nothing else of this library.
ORDER = (
    "errors",
    "arguments",
    "counting",
    "distributed",
    "messages",
    "events",
    "forward_output",
    "carried",
    "state",
    "transfer",
    "reading",
    "dispatch",
    "loop",
    "signals",
    "groups",
    "limits",
    "engine",
    "handler",
    "loss_declaration",
    "loss_scaling",
    "precision",
    "side_effects",
    "placeholders",
    "memory_layout",
    "gradients",
    "learning_rates",
    "fused_kernels",
    "stepping",
    "statistics",
    "verdict",
    "out_of_memory",
    "nonfinite",
    "reduction",
    "explicit_reduction",
    "placeholder_reduction",
    "sharded_reduction",
    "wrapping",
    "compilation",
    "generators",
    "samplers",
    "resumable_loader",
    "data_description",
    "data_position",
    "rank_vote",
    "update",
    "micro_batches",
    "evaluator",
    "protection",
    "trainer",
    "disk",
    "lock",
    "encoding",
    "shards",
    "tensor_files",
    "manifest",
    "retention",
    "commit",
    "saving",
    "stored",
    "held_state",
    "optimizer_state",
    "schedule_state",
    "run_state",
    "resumption",
    "checkpoint",
)
# The files of the core that may import handlers, inside the functions that attach them by default.
ATTACHES_HANDLERS = {"protection"}
PUBLIC_PACKAGES = ("ignite_train", "ignite_train.handlers")
MAX_FUNCTION_LINES = 40
MAX_FRAMES, MAX_FRAME_FILES = 6, 3
NAMELESS = {"base", "common", "helpers", "types", "utils"}
# Asking an object for an attribute by a literal name: where, which, and why it may.
PROBES = {
    ("dispatch.py", "name"): "Ignite's events are strings or enum members, and anything may be passed by mistake",
}

CORE = sorted((ROOT / "ignite_train").glob("[!_]*.py"))
HANDLERS = sorted((ROOT / "handlers").glob("[!_]*.py"))
LIBRARY = [ROOT / "ignite_train/__init__.py", *CORE, ROOT / "handlers/__init__.py", *HANDLERS]
SCRIPTS = sorted(path for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """One imported name: `from module import name`, or `import module` with no name."""

    line: int
    module: str
    name: str | None

    @property
    def target(self) -> str:
        """The module it reaches: a submodule that is imported as a name counts as itself."""
        is_submodule = self.name in {*ORDER, "handlers"} and self.module == "ignite_train"
        return f"{self.module}.{self.name}" if is_submodule else self.module


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _imports(path: Path) -> list[Import]:
    """All imports of the file, wherever they stand: in functions, under TYPE_CHECKING, in a try."""
    found: list[Import] = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [Import(node.lineno, module, alias.name) for alias in node.names]
    return found


def _of_this_library(path: Path) -> list[Import]:
    return [found for found in _imports(path) if found.module.partition(".")[0] in {"", "handlers", "ignite_train"}]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _exported(path: Path) -> list[str]:
    """The literal `__all__` of the file."""
    for node in _tree(path).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "__all__":
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    pytest.fail(f"{_name(path)} has no __all__: say which of its names other files may use")


def _each_file(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=_name)


# --- who may import whom ---


def test_every_file_of_the_core_has_a_place():
    """The order names the files of the core, each once."""
    assert sorted(ORDER) == [path.stem for path in CORE]


@_each_file(CORE)
def test_the_core_imports_only_from_above(path):
    """A file of the core imports only what stands above it in the order, so there is no circle and no handler in it.

    Only the file that attaches handlers by default imports them, and never at module level.
    """
    above = {f"ignite_train.{name}" for name in ORDER[: ORDER.index(path.stem)]} if path.stem in ORDER else set()
    in_functions = {
        node.lineno
        for function in ast.walk(_tree(path))
        if isinstance(function, Function) and path.stem in ATTACHES_HANDLERS
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module == "ignite_train.handlers"
    }

    assert [found for found in _of_this_library(path) if found.target not in above and found.line not in in_functions] == []


def test_importing_the_package_imports_no_handler():
    """What is attached by default is imported where it is used, so that `import ignite_train` stays quick."""
    program = "import sys, ignite_train; sys.exit(any(name.startswith('ignite_train.handlers') for name in sys.modules))"

    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@_each_file(HANDLERS)
def test_a_handler_imports_the_core_and_no_other_handler(path):
    """A handler can be copied out of the library with nothing but the core behind it."""
    core = {"ignite_train", *(f"ignite_train.{name}" for name in ORDER)}

    assert [found for found in _of_this_library(path) if found.target not in core] == []


def test_the_packages_only_collect():
    """`ignite_train` collects names from the core alone, `ignite_train.handlers` from the handlers alone."""
    core = {f"ignite_train.{name}" for name in ORDER}
    handlers = {f"ignite_train.handlers.{path.stem}" for path in HANDLERS}

    assert [found for found in _of_this_library(ROOT / "ignite_train/__init__.py") if found.target not in core] == []
    assert [found for found in _of_this_library(ROOT / "handlers/__init__.py") if found.target not in handlers] == []


@_each_file(SCRIPTS)
def test_examples_and_benchmarks_use_public_names(path):
    """What we show to users and measure for them is what they can import themselves."""
    public = {"ignite_train": {*_exported(ROOT / "ignite_train/__init__.py"), "handlers"}}
    public["ignite_train.handlers"] = set(_exported(ROOT / "handlers/__init__.py"))
    ours = _of_this_library(path)

    assert [found for found in ours if found.module not in PUBLIC_PACKAGES] == []
    assert [found for found in ours if found.name is not None and found.name not in public[found.module]] == []


@_each_file([*LIBRARY, *SCRIPTS, *TESTS])
def test_nobody_imports_bare_handlers(path):
    """By its folder's name a handler would exist twice, and a user's own `handlers` would be in the way."""
    assert [found for found in _imports(path) if found.module.partition(".")[0] == "handlers"] == []


# --- what is public ---


@_each_file(LIBRARY)
def test_all_is_sorted_and_complete(path):
    """`__all__` lists each public function and class of the file and nothing that is not there, constants first."""
    names = _exported(path)
    body = _tree(path).body
    defined = {node.name for node in body if isinstance(node, Function | ast.ClassDef)}
    assigned = {
        target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)
    }
    annotated = {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    imported = {found.name for found in _of_this_library(path)} if path.name == "__init__.py" else set()

    assert names == sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert set(names) <= defined | assigned | annotated | imported
    assert {name for name in defined | imported if not name.startswith("_")} <= set(names)


def test_the_core_exports_what_its_files_export():
    """A name of `ignite_train` is in the `__all__` of the file it comes from, and a user can catch each of our errors."""
    import ignite_train

    collected = _of_this_library(ROOT / "ignite_train/__init__.py")
    hidden = [found for found in collected if found.name not in _exported(ROOT / f"{found.module.replace('.', '/')}.py")]

    assert hidden == []
    assert sorted(ignite_train.__all__) == sorted(found.name or "" for found in collected)
    assert set(_exported(ROOT / "ignite_train/errors.py")) <= set(ignite_train.__all__)
    assert [name for name in ignite_train.__all__ if name not in vars(ignite_train)] == []


def test_every_handler_is_exported():
    """A class that a file in handlers/ lists in its `__all__` is a name of `ignite_train.handlers`, and nothing else is."""
    from ignite_train import handlers as package

    listed = {name for path in HANDLERS for name in _exported(path)}
    classes = {node.name for path in HANDLERS for node in _tree(path).body if isinstance(node, ast.ClassDef)}

    assert listed & classes <= set(package.__all__) <= listed
    assert [name for name in package.__all__ if name not in vars(package)] == []


# --- how it is written ---


@_each_file([*LIBRARY, *SCRIPTS, *TESTS])
def test_a_file_has_a_name_of_its_own(path):
    """A file is the noun it defines; `utils` is the noun for what nobody thought about."""
    assert path.stem.strip("_") not in NAMELESS


def _lines_of_code(path: Path) -> set[int]:
    """Numbers of the lines that hold code: no blank ones, no comments, no docstrings."""
    source = path.read_text(encoding="utf-8")
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for token in tokens if token.type not in layout for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            code -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return code


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function and its lines of code: the body without signature and docstring, with what is nested in it."""
    code = _lines_of_code(path)
    for node in ast.walk(_tree(path)):
        if isinstance(node, Function):
            yield f"{node.name}, line {node.lineno}", len(code & set(range(node.body[0].lineno, (node.end_lineno or 0) + 1)))


@_each_file(LIBRARY)
def test_a_function_fits_on_a_screen(path):
    """A function is seen whole."""
    assert {name: lines for name, lines in _functions(path) if lines > MAX_FUNCTION_LINES} == {}


@_each_file(CORE)
def test_the_core_does_not_probe(path):
    """The core knows what its objects are: no `hasattr(x, "...")`, no `getattr(x, "...", default)`."""
    calls = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    probes = [call for call in calls if call.func.id in {"getattr", "hasattr"} and len(call.args) in {2, 3}]
    literal = [(path.name, call.args[1].value, call.lineno) for call in probes if isinstance(call.args[1], ast.Constant)]

    assert [probe for probe in literal if probe[:2] not in PROBES] == []


def test_the_way_from_run_to_backward_is_short():
    """Between the user's `run` and backward stand few frames in few files, so a traceback can be read."""
    import torch

    from ignite_train import create_trainer

    model = torch.nn.Linear(1, 1)
    frames: list[traceback.FrameSummary] = []

    def forward(model, micro_batch):
        loss = model(micro_batch).sum()
        loss.register_hook(lambda gradient: frames.extend(traceback.extract_stack()))
        return loss

    create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward).run([torch.ones(1, 1)])
    files = [frame.filename for frame in frames if Path(frame.filename).parent == ROOT / "ignite_train"]

    assert len(files) <= MAX_FRAMES
    assert len(set(files)) <= MAX_FRAME_FILES


def test_the_order_is_documented():
    """The list in docs/architecture.md is the order that is held here."""
    section = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("## Who imports whom")[2]

    assert tuple(re.findall(r"(\w+)\.py", section.split("```")[1])) == ORDER

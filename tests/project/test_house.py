"""The house: who may import whom, what is public, how large a function may be. Read from the syntax trees.

When one of these fails, change the code and not the number here. The library is imported inside the few tests that need it, so
that the others also speak when it cannot be imported.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from private_names import defined_names, private_names_of_others
from tiers import slow

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "ignite_train").is_dir(), reason="looks at a checkout, and this is none")

# The folders of the library from the ground up. A file imports from its own folder and from the rows below it, nothing else.
ROWS = (
    ("internals",),  # private names of torch and Ignite
    ("vocabulary",),  # the files below
    ("device",),
    ("model",),
    ("ranks",),
    ("engine",),
    ("data",),
    ("trainer", "evaluation"),
    ("update", "checkpoint", "kinds_of_handlers"),
    ("fast",),  # accelerations; only `create` asks for them
    ("handlers",),
    ("protection",),  # attaches handlers by default, and so may import them
    ("create",),
    ("supervised", "defaults"),
    ("tools",),  # beside the core, which imports none of them
    ("plot", "plan", "elastic"),
)
# Files through which users come in: they hold nothing but names of others, from any row, and nobody imports them.
DOORS = (
    "ignite_train/checkpoint/__init__.py",
    "ignite_train/checkpoint/__main__.py",
    "ignite_train/elastic.py",
    "ignite_train/plan.py",
    "ignite_train/plot.py",
)
VOCABULARY = ("arguments", "errors", "events", "forward", "metrics", "other_words", "state", "traffic")
# Files whose public names do not contain the name of the file: each is a collection, and is called what it collects.
COLLECTIONS = {
    "ignite_train/arguments.py",
    "ignite_train/data/description.py",
    "ignite_train/internals/of_distributed.py",
    "ignite_train/internals/of_ignite.py",
    "ignite_train/internals/of_torch.py",
    "ignite_train/model/memory_layout.py",
    "ignite_train/protection.py",
    "ignite_train/ranks/messages.py",
    "ignite_train/ranks/wrapping.py",
    "ignite_train/tools/inspection.py",
    "ignite_train/update/compilation.py",
}
PUBLIC_PACKAGES = (
    "ignite_train",
    "ignite_train.kinds_of_handlers",
    "ignite_train.handlers",
    "ignite_train.checkpoint",
    "ignite_train.plan",
    "ignite_train.plot",
)
# The folders of `tests/` that are none of the library's.
OTHER_TESTS = {
    "commands": "what `make` starts beside pytest, and the tests of it",
    "examples": "the scripts of examples/ and the code of the documents, run as a user runs them",
    "project": "the house, the documents, what is built from a checkout",
    "support": "what tests of several folders import",
    "ignite_suite": "runs Ignite's own tests",
    "libraries": "run in environments of their own",
    "migration": "the scripts of docs/migration.md, of other libraries too",
}
APART = {"ignite_suite", "libraries", "migration"}  # their files are never imported with the other tests
MAX_FUNCTION_LINES = 40
MAX_DEPTH = 4
MAX_FRAMES, MAX_FRAME_FILES = 6, 4  # trainer, loop, update, gather
# Modules that are slow to import: `import ignite_train` loads none of them that Ignite's engine has not loaded before.
SLOW_TO_IMPORT = (
    "IPython",
    "asyncio",
    "matplotlib",
    "multiprocessing",
    "numpy.testing",
    "pandas",
    "scipy",
    "sklearn",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torch._functorch",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental",
    "torch.onnx",
    "torch.profiler",
    "torch.testing",
    "torch.utils.benchmark",
    "torch.utils.tensorboard",
    "torchdata",
    "torchmetrics",
    "torchvision",
    "tqdm",
    "typer",
    "unittest",
)
NAMELESS = {"base", "common", "helpers", "types", "utils"}
# Asking an object for an attribute by a literal name: where, which, and why it may.
PROBES = {
    ("dispatch.py", "name"): "Ignite's events are strings or enum members, and anything may be passed by mistake",
}

# Where private names of torch and Ignite may stand. The tests of `tests/internals/` say of each what must be true of it.
HAVE_PRIVATE_NAMES = ("ignite_train/internals/", "ignite_train/fast/")
# Private names of torch and Ignite that a file of ours has given to something else, too.
OF_OTHERS = {"_model": "ignite.distributed.utils", "_version": "Tensor"}
# Strings that look like private names and are none: file, string, and what it is.
NO_NAMES_OF_OTHERS = {
    ("handlers/reduce_on_plateau.py", "_latest_update"): "a key in its own state",
    ("handlers/reduce_on_plateau.py", "_score"): "a key in its own state",
    ("handlers/training_metrics.py", "_per_second"): "the end of the name of a metric",
    ("handlers/training_metrics.py", "_seconds"): "the end of the name of a metric",
    ("ignite_train/checkpoint/problems.py", "_latest_update"): "a key in the state of `ReduceOnPlateau`",
    ("ignite_train/checkpoint/problems.py", "_score"): "a key in the state of `ReduceOnPlateau`",
    ("ignite_train/metrics.py", "_per_second"): "the end of the name of a metric",
    ("ignite_train/ranks/whereabouts.py", "_WAITS_FOR_RANKS"): "what our own files say of themselves",
    ("ignite_train/ranks/whereabouts.py", "_WAITS_FOR_THREADS"): "what our own files say of themselves",
    ("ignite_train/tools/distributed_checkpoint.py", "_MEM_FORMAT_ENCODING"): "part of the format of torch's files",
    ("ignite_train/tools/distributed_checkpoint.py", "_StorageInfo"): "part of the format of torch's files",
    ("ignite_train/tools/distributed_checkpoint.py", "_get_layout"): "part of the format of torch's files",
}

CORE = sorted(path for path in (ROOT / "ignite_train").rglob("*.py") if "handlers" not in path.relative_to(ROOT).parts)
HANDLERS = sorted((ROOT / "handlers").glob("[!_]*.py"))
LIBRARY = [*CORE, ROOT / "handlers/__init__.py", *HANDLERS]
PACKAGES = {path for path in LIBRARY if path.name == "__init__.py"}
SCRIPTS = sorted(path for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """One imported name: `from module import name`, or `import module` with no name."""

    line: int
    module: str
    name: str | None


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _all_statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of all blocks within the node, at any depth."""
    for child in _statements(node):
        yield child
        yield from _all_statements(child)


@functools.cache
def _imports(path: Path) -> list[Import]:
    """All imports of the file, wherever they stand: in functions, under TYPE_CHECKING, in a try."""
    found: list[Import] = []
    for node in _all_statements(_tree(path)):
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


# --- who may import whom ---


def _module(path: Path) -> str:
    """The dotted name by which the file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("ignite_train", *parts) if parts[0] == "handlers" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _row(module: str) -> tuple[int, str]:
    """Where a module stands: the number of its row, and its folder."""
    name = (*module.split("."), "")[1]
    folder = "vocabulary" if name in VOCABULARY else name
    return next((number, folder) for number, row in enumerate(ROWS) if folder in row)


def _targets(path: Path) -> set[str]:
    """The modules of this library that the file imports; a submodule that is imported as a name counts as itself."""
    modules = {_module(other) for other in LIBRARY}
    found = _of_this_library(path)
    return {name if (name := f"{one.module}.{one.name}") in modules else one.module for one in found}


def _graph() -> dict[str, set[str]]:
    return {_module(path): _targets(path) for path in LIBRARY}


def test_every_file_has_a_place():
    """Each file stands in a folder of the list, or is one of the shared vocabulary; each folder says what it is for."""
    homeless = [_name(path) for path in [*CORE, *HANDLERS] if path not in PACKAGES and not _has_row(_module(path))]

    assert homeless == []
    assert [_name(path) for path in PACKAGES if not ast.get_docstring(_tree(path))] == []


def _has_row(module: str) -> bool:
    try:
        _row(module)
    except StopIteration:
        return False
    return True


@pytest.mark.slow
def test_a_file_imports_from_the_rows_below_it():
    """Data flows one way: no file imports from a row above its own, or from the other folder in its row."""
    wrong = []
    for path in [*CORE, *HANDLERS]:
        if path in PACKAGES or _name(path) in DOORS:
            continue
        row, folder = _row(_module(path))
        for target in _targets(path):
            other_row, other_folder = _row(target)
            if other_row > row or (other_row == row and other_folder != folder):
                wrong.append(f"{_name(path)} imports {target}")
    assert wrong == []


def test_no_file_of_the_core_imports_a_tool_or_a_door():
    """Training needs neither; and a door defines nothing of its own."""
    doors = {_module(ROOT / name) for name in DOORS}
    core = [
        path for path in [*CORE, *HANDLERS] if "tools" not in path.parts and _name(path) not in DOORS and path not in PACKAGES
    ]
    found = {(_name(path), one.module) for path in core for one in _of_this_library(path)}

    assert [one for one in found if one[1] in doors or one[1].startswith("ignite_train.tools")] == []
    assert [name for name in DOORS if any(isinstance(node, Function | ast.ClassDef) for node in _tree(ROOT / name).body)] == []


@pytest.mark.slow
def test_there_is_no_circle():
    """No file imports itself by way of others, also not inside a folder."""
    graph, done = _graph(), set()
    packages = {_module(path) for path in PACKAGES}

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle: {' -> '.join((*above, module))}"
        if module not in done and module not in packages:
            for target in graph.get(module, ()):
                visit(target, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_a_handler_imports_the_core_and_no_other_handler():
    """A handler can be copied out of the library with nothing but the core behind it."""
    handlers = {_module(path) for path in HANDLERS}

    assert {_name(path): found for path in HANDLERS if (found := _targets(path) & {*handlers, "ignite_train.handlers"})} == {}


def test_the_packages_only_collect():
    """`ignite_train` collects names from the core alone, `ignite_train.handlers` from the handlers, folders hold nothing."""
    handlers = {_module(path) for path in HANDLERS}

    assert _targets(ROOT / "ignite_train/__init__.py") & handlers == set()
    assert _targets(ROOT / "handlers/__init__.py") - handlers == {"ignite_train.other_words"}
    folders = [path for path in PACKAGES if _module(path) not in PUBLIC_PACKAGES]
    assert [_name(path) for path in folders if _of_this_library(path)] == []


@functools.cache
def _loaded_by(module: str) -> list[str]:
    """The modules that the import of `module` loads in a process that has Ignite's engine."""
    program = f"import sys, ignite.engine; before = {{*sys.modules}}; import {module}; print(*{{*sys.modules}} - before)"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def _slow_ones(loaded: list[str]) -> list[str]:
    return [name for name in loaded if f"{name}.".startswith(tuple(f"{slow}." for slow in SLOW_TO_IMPORT))]


@pytest.mark.slow
def test_importing_the_package_imports_no_handler():
    """`import ignite_train` stays quick: handlers are loaded where they are used."""
    assert "ignite_train.trainer" in _loaded_by("ignite_train")
    assert [name for name in _loaded_by("ignite_train") if name.startswith("ignite_train.handlers")] == []


@pytest.mark.slow
def test_importing_the_package_imports_nothing_slow():
    """What takes long is imported by the function that uses it, and so is each package but torch, Ignite and NumPy."""
    packages = {name.partition(".")[0] for name in _loaded_by("ignite_train")} - sys.stdlib_module_names

    assert _slow_ones(_loaded_by("ignite_train")) == []
    assert {name for name in packages if "cython" not in name} <= {"ignite_train", "numpy", "torch"}


@pytest.mark.slow
def test_importing_the_handlers_imports_nothing_slow():
    """A script that saves and shows its run imports nothing slow either, but for `tqdm`, which Ignite has loaded in part."""
    loaded = _loaded_by("ignite_train.handlers")

    assert "ignite_train.handlers.checkpoint" in loaded
    assert [name for name in _slow_ones(loaded) if not name.startswith("tqdm.")] == []


def test_examples_and_benchmarks_use_public_names():
    """What we show to users and measure for them is what they can import themselves."""
    public = {"ignite_train": {*_exported(ROOT / "ignite_train/__init__.py"), "handlers"}}
    public["ignite_train.kinds_of_handlers"] = set(_exported(ROOT / "ignite_train/kinds_of_handlers/__init__.py"))
    public["ignite_train.handlers"] = set(_exported(ROOT / "handlers/__init__.py"))
    public["ignite_train.checkpoint"] = set(_exported(ROOT / "ignite_train/checkpoint/__init__.py"))
    public["ignite_train.plan"] = set(_exported(ROOT / "ignite_train/plan.py"))
    public["ignite_train.plot"] = set(_exported(ROOT / "ignite_train/plot.py"))
    ours = {(_name(path), found) for path in SCRIPTS for found in _of_this_library(path)}

    assert [found for found in ours if found[1].module not in PUBLIC_PACKAGES] == []
    assert [found for found in ours if found[1].name is not None and found[1].name not in public[found[1].module]] == []


@pytest.mark.slow
def test_bare_handlers_are_not_imported():
    """By its folder's name a handler would exist twice, and a user's own `handlers` would be in the way."""
    everywhere = [*LIBRARY, *SCRIPTS, *TESTS]

    assert [
        (_name(path), found) for path in everywhere for found in _imports(path) if found.module.partition(".")[0] == "handlers"
    ] == []


# --- what is public ---


@pytest.mark.slow
def test_all_is_sorted_and_complete():
    """`__all__` lists each public function and class of the file and nothing that is not there, constants first."""
    for path in LIBRARY:
        if path in PACKAGES and _module(path) not in PUBLIC_PACKAGES:
            continue
        names, body = _exported(path), _tree(path).body
        defined = {node.name for node in body if isinstance(node, Function | ast.ClassDef)}
        targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
        targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
        assigned = {target.id for target in targets if isinstance(target, ast.Name)}
        imported = (
            {found.name for found in _of_this_library(path)} if path in PACKAGES or (names and _name(path) in DOORS) else set()
        )

        assert names == sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name)), _name(path)
        assert set(names) <= defined | assigned | imported, _name(path)
        offered = {name for name in defined | imported if not name.startswith("_")} - {"answers_imports"}
        assert offered <= set(names), _name(path)


def test_the_core_exports_what_its_files_export():
    """A name of `ignite_train` is in the `__all__` of the file it comes from, and a user can catch each of our errors."""
    import ignite_train

    collected = [found for found in _of_this_library(ROOT / "ignite_train/__init__.py") if found.name != "answers_imports"]
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


# --- the tests ---


@pytest.mark.slow
def test_the_ids_of_tests_are_the_same_in_each_process(request):
    """No id holds an address or a set, whose order changes: pytest-xdist runs tests only if all its processes have the same."""
    given = {item.nodeid: item.callspec.params.values() for item in request.session.items if hasattr(item, "callspec")}
    sets = {
        name
        for name, values in given.items()
        if any(isinstance(value, set | frozenset) and str(value) in name for value in values)
    }

    assert [name for name in given if " at 0x" in name or name in sets] == []


def test_public_members_of_the_trainer_are_documented():
    """What a trainer has beyond Ignite's engine is for users or authors of handlers, and a document names it."""
    import torch
    from ignite.engine import Engine

    from ignite_train import create_trainer

    model = torch.nn.Linear(1, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum())
    of_ignite = {*dir(Engine(lambda engine, batch: None))}
    members = {name for name in dir(trainer) if not name.startswith("_")} - of_ignite
    documents = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

    assert {"gradients", "on_exit", "piggybacks"} <= members
    assert [name for name in sorted(members) if not re.search(rf"[Tt]rainer\.{name}\b", documents)] == []


def test_no_file_reaches_a_private_name_of_another():
    """What another file needs of an object is public, and what torch and Ignite have made private stands in `internals/`.

    `fast/`, which only makes quicker what also runs without it, may have more of them. Free are the names with an underscore
    that Python documents, such as `_replace` of named tuples and `os._exit`.
    """
    reached = [
        f"{_name(path)}:{line} {name}"
        for path in LIBRARY
        if not _name(path).startswith(HAVE_PRIVATE_NAMES)
        for line, name in private_names_of_others(path)
        if (_name(path), name) not in NO_NAMES_OF_OTHERS
    ]

    assert reached == []


def test_fast_and_internals_reach_no_private_name_of_ours():
    """What they may have is of torch and Ignite."""
    ours = set().union(*map(defined_names, LIBRARY)) - OF_OTHERS.keys()
    files = [path for path in LIBRARY if _name(path).startswith(HAVE_PRIVATE_NAMES)]

    assert [(_name(path), found) for path in files for found in private_names_of_others(path) if found[1] in ours] == []


# --- how it is written ---


def test_a_file_has_the_name_of_what_it_defines():
    """A file is called after a public name in it; `utils` is the name for what has no idea of its own."""
    files = [path for path in [*CORE, *HANDLERS] if path not in PACKAGES and not path.stem.startswith("_")]

    def says_its_name(path: Path) -> bool:
        key = path.stem.replace("_", "").removesuffix("s")
        return any(key in name.replace("_", "").lower() for name in _exported(path))

    assert {_name(path) for path in files if not says_its_name(path)} == COLLECTIONS
    assert [_name(path) for path in [*LIBRARY, *SCRIPTS, *TESTS] if path.stem.strip("_") in NAMELESS] == []


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that stand directly in a block; expressions hold none."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        yield from vars(node).get(field, ())


def _defined(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | Function]:
    """The node, if it is a module, a class or a function, and all of these inside it."""
    if isinstance(node, ast.Module | ast.ClassDef | Function):
        yield node
    for child in _statements(node):
        yield from _defined(child)


def _functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Each function, its lines of code (without signature, docstrings, comments) and how deep its blocks are nested."""
    lines, defined = path.read_text(encoding="utf-8").splitlines(), list(_defined(_tree(path)))
    code = {number for number, line in enumerate(lines, start=1) if (text := line.strip()) and not text.startswith("#")}
    for node in defined:
        if ast.get_docstring(node, clean=False) is not None:
            code -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for node in defined:
        if isinstance(node, Function):
            length = len(code & set(range(node.body[0].lineno, (node.end_lineno or 0) + 1)))
            yield f"{_name(path)}:{node.lineno} {node.name}", length, max(map(_depth, node.body))


def _depth(node: ast.AST) -> int:
    """How many blocks stand inside one another; `elif` is no deeper than its `if`."""
    block = isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try | Function | ast.AsyncFor | ast.AsyncWith)
    is_elif = isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
    inner = [_depth(child) - (is_elif and child in node.orelse) for child in _statements(node)]
    return block + max(inner, default=0)


@pytest.mark.parametrize("folder", ["library", slow("tests")])
def test_a_function_fits_on_a_screen(folder: str):
    """A function has at most 40 lines and 4 blocks inside one another, a test too."""
    found = [function for path in {"library": LIBRARY, "tests": TESTS}[folder] for function in _functions(path)]

    assert [function for function in found if function[1] > MAX_FUNCTION_LINES] == []
    assert [name for name, _, depth in found if depth > MAX_DEPTH] == []


def test_the_core_does_not_probe():
    """The core knows what its objects are: no `hasattr(x, "...")`, no `getattr(x, "...", default)`."""
    for path in CORE:
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
    files = [frame.filename for frame in frames if (ROOT / "ignite_train") in Path(frame.filename).parents]

    assert len(files) <= MAX_FRAMES
    assert len(set(files)) <= MAX_FRAME_FILES


def test_the_order_is_documented():
    """docs/architecture.md shows the rows that are held here."""
    section = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("## Who imports whom")[2]
    shown = [tuple(re.findall(r"[a-z_]+", line.partition("  ")[0])) for line in section.split("```")[1].strip().splitlines()]

    assert tuple(shown) == ROWS


def test_the_tests_lie_in_the_folders_of_the_library():
    """A test lies in the folder of what it is about, or in one of a few others; beside them lies what pytest reads first."""
    beside = {path.name for path in (ROOT / "tests").iterdir() if path.is_file()}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in TESTS} - beside
    of_the_library = {path.parent.name for path in PACKAGES if path.parent != ROOT / "ignite_train"}

    assert beside == {"conftest.py"}
    assert {*OTHER_TESTS} <= folders <= {*OTHER_TESTS} | of_the_library


def test_no_two_files_of_tests_have_one_name():
    """The folders are no packages: pytest, and each process that a test starts, finds a module by its name alone."""
    names = Counter(path.stem for path in TESTS if path.parent.name not in APART)

    assert [name for name, count in names.items() if count > 1] == []
    assert [_name(path) for path in TESTS if path.name == "__init__.py"] == []


def test_no_test_imports_from_a_conftest():
    """There are two files of that name, and which one a rank finds that was forked depends on its path."""
    assert [_name(path) for path in TESTS if re.search(r"^(?:from|import) conftest\b", path.read_text(), re.MULTILINE)] == []


# --- how much one update enters ---


MOST = {"plain": (19, 67, 82), "metrics": (21, 79, 108), "save": (30, 150, 409)}  # files, functions and calls


def test_one_update_enters_no_more_than_it_did():
    """The figures may fall. For a save in the update 30, 150 and 800 were sought. Without `fast/` it is one call more."""
    as_users_run_it = {name: value for name, value in os.environ.items() if name != "IGNITE_TRAIN_FAST"}
    run = subprocess.run(
        [sys.executable, ROOT / "tests/support/following.py", *MOST],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        cwd=ROOT,
        env=as_users_run_it,
    )
    found = {mode: tuple(map(int, line.split())) for mode, line in zip(MOST, run.stdout.splitlines(), strict=True)}
    more = {mode: found[mode] for mode, most in MOST.items() if any(a > b for a, b in zip(found[mode], most, strict=True))}
    assert more == {}

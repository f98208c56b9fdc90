"""The documents speak of what exists: files, names, commands, and the order in which the events fire."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ignite.distributed
import ignite.engine
import ignite.handlers
import ignite.metrics
import pytest
import torch
from ignite.engine import Events

import ignite_train
from ignite_train import Trainer, TrainEvents, create_trainer, handlers

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

pytestmark = pytest.mark.skipif(not (ROOT / "ignite_train").is_dir(), reason="looks at a checkout, and this is none")

FOLDERS = ("", ".ci", "benchmarks", "docs", "examples", "handlers", "ignite_train", "tests")
PACKAGE_FOLDERS = tuple(f"ignite_train/{path.parent.name}" for path in (ROOT / "ignite_train").glob("*/__init__.py"))
TEST_FOLDERS = tuple(sorted(f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir()))
PACKAGE_NAMES = tuple(folder.rpartition("/")[2] for folder in PACKAGE_FOLDERS)
FOREIGN_FILES = {
    "handlers.py": "a module of the user's own",
    "train.py": "the user's script",
}
FOREIGN_NAMES = {
    "DynamicLossScaler": "fairseq and DeepSpeed",
    "DPOTrainer": "TRL",
    "FailureConfig": "Ray Train",
    "GRPOTrainer": "TRL",
    "GradsHistHandler": "a logger of Ignite's, in a module that not each installation can import",
    "GradsScalarHandler": "another one",
    "Linear4bit": "bitsandbytes",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "Mixup": "timm",
    "PyTorchJob": "Kubernetes",
    "Shard": "a placement of torch.distributed.tensor",
    "StatefulDataLoader": "torchdata",
    "SupervisedTrainer": "MONAI",
}
ELSEWHERE = (
    builtins,
    torch,
    torch.amp,
    torch.autograd,
    torch.distributed,
    torch.distributed.optim,
    torch.nn,
    torch.nn.parallel,
    torch.optim,
    torch.optim.lr_scheduler,
    torch.utils.data,
    torch.utils.data.distributed,
    ignite.distributed,
    ignite.engine,
    ignite.handlers,
    ignite.metrics,
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_WORDS_OF_OTHERS = re.compile(r"^\|[^|]*\|", re.MULTILINE)  # the first cell of a row
_LINK = re.compile(r"\]\(([^)#\s]+)")
_CHAIN = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_MODULE = re.compile(r"\bignite_train(?:\.[A-Za-z_]\w*)+")
_COMMAND = re.compile(r"^(?:\$ )?make ([a-z][\w-]*)", re.MULTILINE)
_FILE = re.compile(r"[\w.*-]+\.(?:py|md|toml|txt)")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_document = pytest.mark.parametrize("document", DOCS, ids=_name)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    """A trainer that has run, so that everything a document can speak of is there."""
    model = torch.nn.Linear(1, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum())
    trainer.run([torch.ones(1, 1)])
    return trainer


def _code(document: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """What stands between single backticks, and the fenced blocks with their language."""
    text = document.read_text(encoding="utf-8")
    ours = _WORDS_OF_OTHERS.sub("|", text) if document.name == "migration.md" else text
    return _INLINE.findall(_FENCE.sub("", ours)), _FENCE.findall(text)


# --- files and commands ---


def _paths(text: str) -> Iterator[str]:
    """The words that look like a file of this repository, with the test in it if one is named."""
    for word in re.split(r"[\s,;()'\"=→│├└─]+", text):
        path = word.rstrip(".:")
        first, _, rest = path.partition("/")
        if "<" not in path and ((rest and first in {*FOLDERS[1:], *PACKAGE_NAMES}) or _FILE.fullmatch(path.partition("::")[0])):
            yield path


def _path_exists(path: str) -> bool:
    path, _, test = path.partition("::")
    folders = (*FOLDERS, *PACKAGE_FOLDERS, *TEST_FOLDERS) if "/" not in path else ("", "ignite_train")
    found = [match for folder in folders for match in (ROOT / folder).glob(path.rstrip("/"))]
    return path in FOREIGN_FILES or any(not test or f"def {test}(" in match.read_text(encoding="utf-8") for match in found)


@each_document
def test_every_file_that_is_named_exists(document):
    """A path in code or in a link leads to a file of this repository."""
    inline, blocks = _code(document)
    named = {path for text in [*inline, *(text for _, text in blocks)] for path in _paths(text)}
    linked = {link for link in _LINK.findall(document.read_text(encoding="utf-8")) if ":" not in link}

    assert sorted(path for path in named if not _path_exists(path)) == []
    assert sorted(link for link in linked if not (document.parent / link).exists()) == []


def _anchors(document):
    """The anchors of a page: its headings in small letters, with hyphens between the words."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@each_document
def test_every_anchor_of_a_link_is_a_heading(document):
    """Of the same page or of another one; `make docs` asks for it too."""
    links = re.findall(r"\]\(([^)\s:]*\.md|)#([^)\s]+)\)", document.read_text(encoding="utf-8"))

    assert [link for link in links if link[1] not in _anchors((document.parent / link[0]) if link[0] else document)] == []


@each_document
def test_the_language_of_a_block_is_one_word(document):
    """The site takes a block with more behind its language for text, and headings after it for code."""
    marks = re.findall(r"^ *```+ *(\S.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)

    assert [mark for mark in marks if not mark.isalpha()] == []


@each_document
def test_every_command_that_is_named_exists(document):
    """A `make` command in a document is a target of the Makefile."""
    inline, blocks = _code(document)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

    assert set(_COMMAND.findall("\n".join([*inline, *(text for _, text in blocks)]))) <= targets


def test_every_command_of_the_workflows_exists():
    """What runs on a hosting site, and what its forms ask for, are targets of the Makefile and files of this repository."""
    texts = [path.read_text(encoding="utf-8") for path in [*(ROOT / ".github").rglob("*.*"), ROOT / ".pre-commit-config.yaml"]]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = {command for text in texts for command in re.findall(r"(?:run: |`)make ([a-z][\w-]*)", text)}

    assert {"test-all", "nightly", "wheel-test"} <= commands <= targets
    assert any("run: bash .ci/run" in text for text in texts)
    assert (ROOT / ".ci/run").is_file()


def test_the_parts_of_the_nightly_are_all_of_it():
    """Each folder with a test of that mark is in a part; each part has an hour."""
    workflow = (ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8")
    parts = workflow.partition("part:")[2].partition("steps:")[0]
    mark = re.compile(r"mark\.nightly|import .*\bnightly\b")
    marked = [path for path in (ROOT / "tests").glob("*/test_*.py") if mark.search(path.read_text(encoding="utf-8"))]

    assert {f"tests/{path.parent.name}" for path in marked} - {*parts.split()} == set()
    assert "timeout-minutes: 60" in workflow.partition("strategy:")[0]


def test_the_workflows_try_the_versions_that_are_promised():
    """The versions of Python in the classifiers, the first of which is the oldest that can be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = [version for one in project["classifiers"] if (version := one.rpartition(" :: ")[2]).startswith("3.")]
    tried = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))

    assert tried is not None
    assert tried[1].replace('"', "").split(", ") == promised
    assert project["requires-python"] == f">={promised[0]}"


# --- names ---


def _has(owner: Any, attributes: list[str]) -> bool:
    """Whether `owner.a.b...` exists; an attribute that a class only declares counts."""
    for index, name in enumerate(attributes):
        declared = {key for kind in getattr(owner, "__mro__", ()) for key in vars(kind).get("__annotations__", ())}
        if hasattr(owner, name):
            owner = getattr(owner, name)
        else:
            return name in declared and index == len(attributes) - 1
    return True


def _module_exists(dotted: str) -> bool:
    """Whether `ignite_train.a.b.c` can be imported, or is a name in what can be."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return _has(owner, parts[end:])
    return False


def _name_exists(chain: str) -> bool:
    """Whether a capitalised name, with what follows it, is one of ours or of what we stand on."""
    head, *rest = chain.split(".")
    modules = [*(ROOT / "ignite_train").rglob("[!_]*.py"), *(ROOT / "ignite_train/handlers").glob("[!_]*.py")]
    ours = [importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in modules]
    if head.isupper():  # an event, or a constant of somebody's
        is_event = head.endswith(("_STARTED", "_COMPLETED", "_SKIPPED", "_READY", "_MEMORY"))
        return not is_event or _has(TrainEvents, [head]) or _has(Events, [head])
    return head in FOREIGN_NAMES or any(_has(module, [head, *rest]) for module in (*ours, *ELSEWHERE))


@pytest.mark.sampled(5)
@each_document
def test_every_name_of_this_library_exists(document, trainer):
    """A module, class, event or attribute that a document names is in the code."""
    inline, blocks = _code(document)
    chains = {match.group() for token in inline if (match := _CHAIN.match(token)) and not _FILE.fullmatch(token)}
    modules = set(_MODULE.findall("\n".join([*inline, *(text for _, text in blocks)])))
    roots = {"trainer": trainer, "state": trainer.state, "output": trainer.state.output}
    attributes = {chain for chain in chains if chain.partition(".")[0] in roots}

    assert sorted(module for module in modules if not _module_exists(module)) == []
    assert sorted(chain for chain in chains if chain[0].isupper() and not _name_exists(chain)) == []
    assert sorted(chain for chain in attributes if not _has(roots[chain.split(".")[0]], chain.split(".")[1:])) == []


@each_document
def test_every_import_that_is_shown_works(document):
    """What a Python block imports from this library is public."""
    for language, text in _code(document)[1]:
        if language != "python":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ignite_train":
                package = importlib.import_module(node.module or "")
                assert {alias.name for alias in node.names} <= {*package.__all__, "handlers"}


# --- what the documents promise ---


def test_every_dependency_has_its_reason():
    """docs/decisions.md says of each dependency in pyproject.toml why it is there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, tools = settings["project"], settings["build-system"]["requires"]
    required = [
        *project["dependencies"],
        *tools,
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    names = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in required}

    assert sorted(names - set(_INLINE.findall((ROOT / "docs/decisions.md").read_text(encoding="utf-8")))) == []


def test_every_handler_is_in_a_table():
    """docs/handlers.md has a row for each ready-made handler."""
    text = (ROOT / "docs/handlers.md").read_text(encoding="utf-8")
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = {name for cell in first_cells for name in _INLINE.findall(cell)}
    kinds = {name for name, value in vars(handlers).items() if isinstance(value, type) and "attach" in dir(value)}

    assert listed == kinds


@pytest.mark.parametrize("word", ["every", "seed", "score"])
def test_each_meaning_of_a_word_is_in_a_table(word):
    """docs/handlers.md says what `every=`, `seed=` and `score=` mean wherever a public function or class takes them."""
    section = (ROOT / "docs/handlers.md").read_text(encoding="utf-8").partition("## What `every=`")[2]
    public = {name: vars(module)[name] for module in (ignite_train, handlers) for name in module.__all__}
    classes = {name: value.__init__ if isinstance(value, type) else value for name, value in public.items() if callable(value)}
    takers = {name for name, value in classes.items() if word in inspect.signature(value).parameters}

    assert {name for name in takers - {"create_supervised_trainer"} if f"`{name}" not in section} == set()
    assert len(takers) > 2


def test_a_fine_tuning_is_short(tmp_path, monkeypatch, capsys):
    """Averaged weights, schedule, early stopping, best and last checkpoint in at most 40 lines, which run alone, as printed."""
    text = (ROOT / "docs/handlers.md").read_text(encoding="utf-8").partition("## A fine-tuning")[2]
    block = _FENCE.search(text)[2]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/handlers.md", "exec"), {})  # noqa: S102
    printed = capsys.readouterr().out.splitlines()

    assert len(block.splitlines()) <= 40
    assert printed[:3] == [
        "Sequential, 643 parameters, 99 of them trained, on cpu in fp32, AdamW",
        "40 updates in 5 epochs: 32 samples each (32 × 1 micro-batches)",
        "writes to " + printed[2].removeprefix("writes to "),
    ]
    assert (tmp_path / "runs/tuning/metrics.jsonl").is_file()
    assert 1 <= len([*(tmp_path / "runs/tuning").glob("update-*")]) <= 2


def test_the_code_on_handlers_runs(tmp_path, monkeypatch):
    """The blocks of docs/handlers.md, one after the other, are one script."""
    monkeypatch.chdir(tmp_path)
    blocks = [text for language, text in _code(ROOT / "docs/handlers.md")[1] if language == "python"]
    names = {}
    exec(compile("".join(blocks), "docs/handlers.md", "exec"), names)  # noqa: S102

    assert names["ema"].num_updates == 0  # attached after the run of its trainer
    assert names["trainer"].state.iteration == names["total"]


def test_the_timeline_is_what_happens():
    """The table in docs/architecture.md lists the events in the order in which they fire, with the counters they filter on."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [_INLINE.findall(line) for line in text.splitlines() if re.match(r"\| `[A-Z_]+`", line)]
    documented = [row for row in rows if row[0] not in {"STEP_SKIPPED", "OUT_OF_MEMORY"}]
    model, fired = torch.nn.Linear(1, 1), []
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum(), accumulation_steps=2
    )
    for event in (*Events, *TrainEvents):
        if event is not Events.EXCEPTION_RAISED:
            trainer.add_event_handler(event, lambda trainer, name: fired.append(name), event.name)
    trainer.run([torch.ones(1, 1)] * 2)

    assert [row[0] for row in documented] == list(dict.fromkeys(fired))
    assert [row[0] for row in rows if row[1] != trainer.state.event_to_attr[row[0]]] == []
    assert {event.name for event in TrainEvents} <= {row[0] for row in rows}


def test_contributing_is_short():
    """What a contributor must read fits on one page."""
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 60

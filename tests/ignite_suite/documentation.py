"""Runs the code in the documentation of the installed Ignite: of its engine and its handlers, as their docstrings print it.

`python documentation.py stock` and `python documentation.py ours` print what became of each block, as JSON: by its name,
whether it ran and what it printed, or the error. With `ours` a trainer is in the place of `Engine`, as in trainer_as_engine.py.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 20
DIRECTIVE = re.compile(r"^( *)\.\. (testcode|code-block:: python|testsetup)\b.*\n((?:\1 +.*\n|\s*\n)+)", flags=re.MULTILINE)


def blocks() -> Iterator[tuple[str, str, str]]:
    """Of each block its name, the set-up that its docstring gives, and its code."""
    import ignite.engine
    import ignite.handlers

    for package in (ignite.engine, ignite.handlers):
        names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        for name in [package.__name__, *names]:
            yield from _blocks_of(importlib.import_module(name))


def _blocks_of(module: Any) -> Iterator[tuple[str, str, str]]:
    tree = ast.parse(inspect.getsource(module))
    for place, node in enumerate(ast.walk(tree)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        text = (ast.get_docstring(node) or "") + "\n"
        found = [(kind, textwrap.dedent(body)) for _, kind, body in DIRECTIVE.findall(text)]
        setup = "\n".join(_code(body) for kind, body in found if kind == "testsetup")
        codes = [_code(body) for kind, body in found if kind != "testsetup"]
        for number, code in enumerate(codes, start=1):
            yield f"{module.__name__}:{getattr(node, 'name', '')}:{place}:{number}", setup, code


def _code(body: str) -> str:
    """The body of a directive without its options."""
    return re.sub(r"^\s*:\w+:.*\n", "", body.lstrip("\n"), flags=re.MULTILINE)


def names_for_blocks() -> dict[str, Any]:
    """What the blocks take as given: an engine that hands on its batch, a model and an optimizer."""
    import ignite.engine
    import ignite.handlers
    import ignite.metrics
    import ignite.utils
    import torch

    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "optim": torch.optim}
    for module in (ignite.engine, ignite.handlers, ignite.metrics, ignite.utils):
        names |= {name: value for name, value in vars(module).items() if not name.startswith("_")}
    make = lambda: ignite.engine.Engine(lambda engine, batch: batch)  # noqa: E731
    torch.manual_seed(666)
    model = torch.nn.Sequential()
    model.add_module("base", torch.nn.Linear(4, 2))
    model.add_module("fc", torch.nn.Linear(2, 1))
    tensor = torch.zeros([1], requires_grad=True)
    data = [torch.full((2, 4), float(number)) for number in range(4)]
    loaders = dict.fromkeys(("train_loader", "data_loader", "dataloader", "val_loader", "data", "train_data_loader"), data)
    numbers = {"num_epochs": 2, "max_epochs": 2, "epoch_length": 4}
    return (
        names
        | loaders
        | numbers
        | {
            "process_function": lambda engine, batch: batch,
            "train_updater": lambda engine, batch: batch,
            "work": lambda *_: None,
            "to_save": {"model": model},
            "save_dir": "saved",
            "get_default_trainer": make,
            "default_trainer": make(),
            "trainer": make(),
            "default_evaluator": make(),
            "evaluator": make(),
            "default_model": model,
            "model": model,
            "default_optimizer": torch.optim.SGD([tensor], lr=0.1),
            "optimizer": torch.optim.SGD([tensor], lr=0.1),
        }
    )


def outcome(setup: str, code: str) -> list[str]:
    """What a block does: that it ran and what it printed, or its error."""
    printed = io.StringIO()
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            names = names_for_blocks()
            exec(setup, names)  # noqa: S102
            exec(code, names)  # noqa: S102
    except BaseException as error:
        return ["failed", f"{type(error).__name__}: {error}"]
    finally:
        signal.alarm(0)
    return ["ran", printed.getvalue()]


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main() -> None:
    """Prints the outcomes of all blocks."""
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent.parent)]
    if sys.argv[1] == "stock":
        os.environ["IGNITE_SUITE_STOCK"] = "1"
    import trainer_as_engine

    trainer_as_engine.pytest_configure(None)
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for name, setup, code in blocks():
            folder = Path(place) / name.replace(":", "-")
            folder.mkdir()
            os.chdir(folder)
            found[name] = outcome(setup, code)
        os.chdir("/")
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

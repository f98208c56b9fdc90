"""What the code in Ignite's documentation takes as given, and repairs of what is not Python there. For documentation.py."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.abc
import importlib.machinery
import re
import sys
import types
from typing import Any
from unittest.mock import MagicMock

TRACKERS = ("clearml", "mlflow", "neptune", "pandas", "polyaxon", "traceml", "visdom", "wandb")
"""Packages of which a stand-in writes down how it is called, whether they are installed or not."""

_REPAIRS = 60
_METRICS = ("clustering", "fairness", "rec_sys", "regression")  # packages whose names ignite.metrics does not have


class Namespace(dict[str, Any]):
    """The names of a block: what Ignite exports, what earlier blocks have defined, and else stand-ins.

    Args:
        before: those of the block before it.
    """

    def __init__(self, before: Namespace | None = None) -> None:
        import ignite.distributed
        import numpy as np
        import torch

        super().__init__({"torch": torch, "nn": torch.nn, "optim": torch.optim, "np": np, "idist": ignite.distributed})
        self["ignite"], self["given"] = ignite, self.given
        self._before = before
        # The engine's last: others have Ignite's own class, which a trainer may stand in for.
        packages = (*(f"metrics.{part}" for part in _METRICS), "handlers", "metrics", "utils", "engine")
        for module in (importlib.import_module(f"ignite.{name}") for name in packages):
            exported = {name: value for name, value in vars(module).items() if not isinstance(value, types.ModuleType)}
            self.update({name: value for name, value in exported.items() if not name.startswith("_")})
        self.initial = {*self}
        torch.manual_seed(666)
        self._model = torch.nn.Sequential()
        self._model.add_module("base", torch.nn.Linear(4, 2))
        self._model.add_module("fc", torch.nn.Linear(2, 2))
        self._tensor = torch.zeros([1], requires_grad=True)
        self._data = [torch.full((2, 4), float(number)) for number in range(4)]
        self._pairs = [(batch, torch.tensor([0, 1])) for batch in self._data]

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        value, before = self.given(name), self._before or {}
        is_data = isinstance(value, list)  # by the end of its name, which a function may have too
        if name in before and (isinstance(value, MagicMock) or (is_data and isinstance(before[name], types.FunctionType))):
            value = before[name]
        self[name] = value
        return value

    def _plain(self) -> dict[str, Any]:
        """The stand-ins of names that are known."""
        import torch

        return {
            **dict.fromkeys(("num_epochs", "max_epochs"), 2),
            **dict.fromkeys(("seed", "checkpoint_iters", "resume", "start_iteration", "num_workers"), 1),
            "epoch_length": 4,
            "batch_size": 2,
            "device": "cpu",
            "save_dir": "saved",
            "names": ["a", "b"],
            "to_save": {"model": self._model},
            "kwargs": {},
            "metrics": {},
            "non_blocking": False,
            "model": self._model,
            "default_model": self._model,
            "lr": 0.1,
            "alpha": 0.1,
            "beta": 1.0,
            "x": self._data[0],
            "y": torch.zeros(2, 1),
            "y_pred": torch.zeros(2, 1),
            "data": self._data,
            "criterion": torch.nn.functional.mse_loss,
            "loss_fn": torch.nn.functional.mse_loss,
            "loss": torch.nn.functional.mse_loss,
            "preprocess_batch": lambda batch: batch,
            "prepare_batch": lambda batch, **_: batch,
            "get_default_trainer": self._engine,
            "param_tensor": self._tensor,
            **dict.fromkeys(("process_function", "train_updater", "update_fn", "training_update_function"), _hand_on),
        }

    def given(self, name: str) -> Any:
        """What a name stands for that the documentation does not define."""
        import torch

        plain = self._plain()
        if name in plain:
            return plain[name]
        if name.endswith(("trainer", "evaluator", "evalutator", "engine")):  # one is misspelt there
            return self._engine()
        if name.endswith("optimizer"):
            return torch.optim.SGD([self._tensor], lr=0.1)
        if name == "lr_scheduler":
            return torch.optim.lr_scheduler.ExponentialLR(self.given("optimizer"), 0.9)
        if name == "metric":
            return self["Accuracy"]()
        if name.startswith(("val", "test")) and name.endswith(("loader", "_set", "dataset")):
            return self._pairs
        if name.endswith(("loader", "data1", "data2", "_data", "_set")):
            return self._data
        return MagicMock(name=name)

    def _engine(self) -> Any:
        import ignite.engine

        engine = ignite.engine.Engine(_hand_on)
        for name in ("alpha", "beta"):
            setattr(engine.state, name, 0.5)
        return engine


def _hand_on(engine: Any, batch: Any) -> Any:
    return batch


# --- repairs ----------------------------------------------------------------------------------------------------------------


def repaired(code: str) -> str:
    """The code without what keeps Python from reading it: printed lines, `...` for more arguments, bodies of comments alone."""
    code = re.sub(r"^>.*$", "", code.replace("'/tmp/", "'tmp/").replace('"/tmp/', '"tmp/'), flags=re.MULTILINE)
    code = re.sub(r",\s*\.\.\.\s*(?=[)}\]])", "", code)
    for _ in range(_REPAIRS):
        try:
            tree = ast.parse(code)
        except SyntaxError as error:
            code = _mended(code.split("\n"), error)
        else:
            return ast.unparse(ast.fix_missing_locations(_Given().visit(tree)))
    raise SyntaxError("the code is not Python")


def _mended(lines: list[str], error: SyntaxError) -> str:
    number = (error.lineno or 1) - 1
    if (found := re.search(r"expected an indented block after .* on line (\d+)", error.msg)) is not None:
        head = lines[int(found[1]) - 1]
        lines.insert(int(found[1]), " " * (len(head) - len(head.lstrip()) + 4) + "pass")
    elif "expected ':'" in error.msg:
        lines[number] += ":"
    elif "unmatched ')'" in error.msg:
        lines[number] = "".join(lines[number].rsplit(")", 1))
    elif "was never closed" in error.msg:
        lines.append(")")
    else:
        raise error
    return "\n".join(lines)


class _Given(ast.NodeTransformer):
    """`model = ...` becomes `model = given("model")`, and `Engine(...)` gets arguments."""

    _ARGUMENTS = {"Engine": ("process_function",), "Checkpoint": ("to_save", "save_dir")}  # noqa: RUF012

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Called for each assignment."""
        self.generic_visit(node)
        target = node.targets[0]
        if isinstance(node.value, ast.Constant) and node.value.value is ... and isinstance(target, ast.Name):
            node.value = ast.Call(ast.Name("given", ast.Load()), [ast.Constant(target.id)], [])
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Called for each call."""
        self.generic_visit(node)
        is_open = not node.keywords and all(isinstance(a, ast.Constant) and a.value is ... for a in node.args)
        if isinstance(node.func, ast.Name) and node.func.id in self._ARGUMENTS and is_open:
            node.args = [ast.Name(name, ast.Load()) for name in self._ARGUMENTS[node.func.id]]
        return node


# --- trackers ---------------------------------------------------------------------------------------------------------------


class Trackers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of packages that are not here, which write down how they are called."""

    def __init__(self) -> None:
        self._roots = {name: MagicMock(name=name) for name in TRACKERS}
        self.with_pandas = False  # whether there is one: scikit-learn uses it where it is installed

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Called by the import system."""
        is_ours = name.partition(".")[0] in TRACKERS and (self.with_pandas or not name.startswith("pandas"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module whose attributes are a mock's."""
        root, _, rest = spec.name.partition(".")
        mock = self._roots[root]
        for part in filter(None, rest.split(".")):
            mock = getattr(mock, part)
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda attribute: getattr(mock, attribute)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""

    def calls(self) -> list[str]:
        """How they were called since they were asked last, without addresses."""
        # pandas gets times, and visdom is called by a thread
        roots = {name: root for name, root in self._roots.items() if name not in ("pandas", "visdom")}
        found = [f"{name}: {call!r}" for name, root in roots.items() for call in root.mock_calls]
        for root in self._roots.values():
            root.reset_mock()
        return [re.sub(r"0x[0-9a-f]+|id='\d+'", "", call) for call in found]


def install_trackers() -> Trackers:
    """Puts them in front of what is installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] in TRACKERS]:
        del sys.modules[name]
    trackers = Trackers()
    sys.meta_path.insert(0, trackers)
    return trackers

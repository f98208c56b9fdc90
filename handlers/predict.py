"""Predictions for a whole dataset: what forward gives, in the order of the dataset."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Literal

import torch
from ignite.engine import Events
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ignite_train.arguments import describe, one_of
from ignite_train.data.description import length_of
from ignite_train.data.samplers import cuts_batches, samplers_of
from ignite_train.evaluation.evaluator import Evaluator, kept_state
from ignite_train.internals.of_torch import ITERATOR, pytree
from ignite_train.ranks import collectives

__all__ = ["predict"]


def predict(evaluator: Evaluator, loader: Iterable[Any], *, gather: Literal["all", "main", "none"] = "all") -> Any:
    """Runs `evaluator` over `loader` and returns its outputs, one row for each sample, in the order of the dataset.

    Forward returns them as `ForwardOutput(loss, sample_size, outputs=...)`: a tensor whose first dimension is the samples of
    the micro-batch, or a tuple, list or mapping of these. Without targets pass a loss of zero, such as `outputs.sum() * 0`.

    With a DataLoader over a dataset that is indexed, the order is that of the indices, whatever the sampler, the number of
    workers and the shares of the ranks are. Any other loader gives its own order, and works in a single process only.

    The evaluator's state is afterwards what it was before, and handlers of its COMPLETED are not called, so that predictions do
    not count as a validation. All ranks must call it: they exchange the indices of their samples once, and the outputs once.

    Args:
        evaluator: from `create_evaluator`.
        loader: micro-batches; ranks may have different numbers, or none. A sample must not be in two of them.
        gather: which ranks get the outputs: `"all"` of them get all outputs; or rank 0, the `"main"` one, gets all and the
            others None, where one rank writes them to a file, say; or each rank gets its own and `"none"` of the others', as
            where they would not fit into the memory of one: in the order of the dataset, and None on a rank without samples.
            Forward may put the index of each sample into its outputs, to identify the samples.

    Returns:
        The outputs, on the CPU, with the structure that forward gave them.

    Raises:
        TypeError: `evaluator` is not from `create_evaluator`, or outputs are not made of tensors.
        ValueError: forward returned no outputs, or they do not have one row for each sample and otherwise the same shape; or a
            sample occurs twice, or is left out by `drop_last` or by `uneven="shortest"`; or there are several ranks and the
            loader has no indices; or `gather` is not one of the three. The same on all ranks.

    Example:
        >>> def forward(model, x):
        ...     y = model(x)
        ...     return ForwardOutput(y.sum() * 0, sample_size=len(x), outputs=y)
        >>> loader = torch.utils.data.DataLoader(torch.arange(5.0).unsqueeze(1), batch_size=2, shuffle=True)
        >>> predict(create_evaluator(torch.nn.Identity(), forward), loader).flatten().tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    if not isinstance(evaluator, Evaluator):
        raise TypeError(f"evaluator must be what create_evaluator returned, got {describe(evaluator)}")
    one_of("gather", gather, ("all", "main", "none"))
    watched, indices = _watched(loader)
    found = _Found(indices, _left_out(loader))
    with (
        kept_state(evaluator),
        # append: nothing else of EPOCH_COMPLETED is left to run when the evaluator is told to skip COMPLETED
        evaluator.append_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.terminate(skip_completed=True)),
        evaluator.prepend_event_handler(Events.ITERATION_COMPLETED, found.add),
    ):
        evaluator.run(watched)
    problem, keys, rows = found.joined()
    form = None if rows is None else pytree.tree_map(lambda leaf: leaf[:0], rows)
    counts = evaluator.data_ranks.counts  # on a mesh several ranks are fed the same samples
    everyones = collectives.gather_objects((problem, keys if counts else [], form))
    _check(everyones)
    if gather == "none":
        return None if rows is None else _in_order(keys, [rows])
    rows = rows if counts else None
    gathered = collectives.gather_objects(rows) if gather == "all" else collectives.gather_objects_on_main_rank(rows)
    return None if gathered is None else _in_order([key for _, keys, _ in everyones for key in keys], gathered)


class _Indices:
    """A sampler, and what it has given for each micro-batch: the indices of its samples, or one for all of them.

    Args:
        sampler: the loader's.
        of_samples: whether it gives the indices of the samples.
    """

    def __init__(self, sampler: Any, *, of_samples: bool) -> None:
        self._sampler, self._of_samples = sampler, of_samples
        self._given: list[Any] = []
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        for given in self._sampler:
            self._given.append(given)
            yield given
        self._has_ended = True

    def were_all(self, micro_batches: int) -> bool:
        """Whether there were no more than so many."""
        return self._has_ended and len(self._given) == micro_batches

    def keys(self, micro_batch: int, rows: int) -> list[tuple[int, int]]:
        """The places of the samples of a micro-batch, which has so many rows where the dataset makes the micro-batches."""
        given = self._given[micro_batch]
        return [(_index(key), 0) for key in given] if self._of_samples else [(_index(given), row) for row in range(rows)]

    def __len__(self) -> int:
        return len(self._sampler)


def _watched(loader: Any) -> tuple[Any, _Indices | None]:
    """A copy of the loader that notes the indices of its micro-batches; the loader itself, and None, if it has no indices."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        if collectives.world_size() > 1:
            raise ValueError(
                f"loader must be a DataLoader over a dataset with indices on several ranks, got a {type(loader).__name__}, "
                "whose samples have no order over the ranks"
            )
        return loader, None
    watched = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = _Indices(getattr(loader, name), of_samples=loader.batch_sampler is not None)
    vars(watched)[name] = indices  # torch's __setattr__ refuses it, for loaders that have begun a pass
    vars(watched)[ITERATOR] = None  # persistent workers read the sampler with which they were started
    watched.in_order = True  # else workers give micro-batches as they are ready, and their indices are those of others
    return watched, indices


def _left_out(loader: Any) -> ValueError | None:
    """The error of a loader that drops some of the last samples: later rows would stand in their places."""
    dealt = (one for one in samplers_of(loader) if type(one) is DistributedSampler and one.drop_last)
    if any((length_of(one.dataset) or 0) % one.num_replicas for one in dealt):
        return ValueError("loader must give all samples, got a DistributedSampler with drop_last=True; use ShardedSampler")
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if not cuts_batches(batches) or not batches.drop_last:
        return None
    length = length_of(batches.sampler)
    surplus = None if length is None else length % batches.batch_size
    if surplus == 0:
        return None
    what = "may leave out some" if surplus is None else f"leaves out {surplus}"
    return ValueError(f"loader must give all samples, got drop_last=True, which {what}; pass drop_last=False")


class _Found:
    """The outputs of this rank's micro-batches, on the CPU.

    Args:
        indices: of the samples; None: they are in the order of the loader.
        problem: what is wrong already.
    """

    def __init__(self, indices: _Indices | None, problem: Exception | None) -> None:
        self._drawn_indices, self._problem = indices, problem
        self._outputs: list[Any] = []
        self._keys: list[tuple[int, int]] = []

    def add(self, evaluator: Evaluator) -> None:
        """Keeps the outputs of the latest micro-batch. An error in them is raised later, on all ranks."""
        if self._problem is None:
            try:
                self._add(evaluator.state.forward_output)
            except (TypeError, ValueError) as error:
                self._problem = error

    def _add(self, output: Any) -> None:
        if output.outputs is None:
            raise ValueError("forward must return outputs, got none; return ForwardOutput(loss, sample_size, outputs=...)")
        leaves, number = _leaves(output.outputs), len(self._outputs)
        rows = len(leaves[0])
        keys = [(number, row) for row in range(rows)] if self._drawn_indices is None else self._drawn_indices.keys(number, rows)
        wrong = next((leaf for leaf in leaves if len(leaf) != len(keys)), None)
        if wrong is not None:
            raise ValueError(
                f"outputs must have one row for each of the {len(keys)} samples of a micro-batch, got the shape "
                f"{tuple(wrong.shape)}"
            )
        self._keys += keys
        self._outputs.append(pytree.tree_map(_on_host, output.outputs))

    def joined(self) -> tuple[Exception | None, list[tuple[int, int]], Any]:
        """The error of this rank, the place of each row in the dataset, and the rows; None without a micro-batch."""
        number, problem = len(self._outputs), self._problem
        if problem is None and self._drawn_indices is not None and not self._drawn_indices.were_all(number):
            problem = ValueError(
                f"evaluator must run on all micro-batches of the loader, and ended after {number}; make it with "
                "uneven='replay' and not 'shortest', and do not terminate it"
            )
        try:
            return problem, self._keys, _cat(self._outputs) if self._outputs and problem is None else None
        except ValueError as error:
            return error, [], None


def _on_host(leaf: Tensor) -> Tensor:
    leaf = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    return leaf.detach().to("cpu", copy=True)


def _check(everyones: list[tuple[Exception | None, list[tuple[int, int]], Any]]) -> None:
    """Raises an error of one rank, or of the outputs of all ranks together, on all ranks.

    Args:
        everyones: of each rank what is wrong there, the places of its rows in the dataset, and its outputs without rows.
    """
    problem = next((problem for problem, _, _ in everyones if problem is not None), None)
    if problem is not None:
        raise problem
    keys = sorted(key for _, keys, _ in everyones for key in keys)
    twice = next((one[0] for one, other in pairwise(keys) if one == other), None)
    if twice is not None:
        raise ValueError(
            f"loader must give each sample once, over all ranks, got sample {twice} twice; pass "
            "the whole dataset on each rank, with sampler=ShardedSampler(dataset, shuffle=False), to the DataLoader"
        )
    _cat([form for _, _, form in everyones if form is not None])


def _in_order(keys: list[tuple[int, int]], outputs: list[Any]) -> Any:
    """The rows of several ranks, None for one without rows, in the order of their places in the dataset."""
    order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))
    return pytree.tree_map(lambda leaf: leaf[order], _cat([rows for rows in outputs if rows is not None]))


def _index(key: Any) -> int:
    """The place of a sample in the dataset; a ResumableLoader gives the epoch before it."""
    index = key[-1] if isinstance(key, tuple) and key else key
    if not isinstance(index, int) and not (isinstance(index, Tensor) and index.numel() == 1):
        raise TypeError(f"loader must have a sampler of integers, got the index {describe(key)}")
    return int(index)


def _leaves(outputs: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(outputs)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(f"outputs must be tensors, or tuples, lists and mappings of tensors, got {describe(outputs)}")
    if any(leaf.ndim == 0 for leaf in leaves):
        raise ValueError("outputs must have one row for each sample of a micro-batch, got a tensor without dimensions")
    return leaves


def _cat(outputs: list[Any]) -> Any:
    """Puts the rows of outputs with the same structure behind each other."""
    leaves, structures = zip(*map(pytree.tree_flatten, outputs), strict=True)
    other = next((output for output, one in zip(outputs, structures, strict=True) if one != structures[0]), None)
    if other is not None:
        raise ValueError(f"outputs must have one structure in all micro-batches, got {describe(other)} too")
    for parts in zip(*leaves, strict=True):
        wrong = next((part for part in parts if part.shape[1:] != parts[0].shape[1:]), None)
        if wrong is not None:
            raise ValueError(
                f"outputs must have the same shape in all micro-batches, but for the samples, got {tuple(parts[0].shape)} and "
                f"{tuple(wrong.shape)}; pad them in forward"
            )
    return pytree.tree_unflatten([torch.cat(parts) for parts in zip(*leaves, strict=True)], structures[0])

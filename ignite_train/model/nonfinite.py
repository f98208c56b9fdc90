"""Finding where a value stopped being finite, by running micro-batches again with hooks (fairseq's NanDetector)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ignite_train.arguments import describe_error
from ignite_train.device.leaves import leaves
from ignite_train.internals.of_torch import pytree
from ignite_train.model.in_full import in_full
from ignite_train.model.sparse_parameters import sparse_gradient_values

__all__ = ["find_nonfinite", "spoilt_buffer"]


def find_nonfinite(
    module: nn.Module, micro_batches: Sequence[Any], loss_of: Callable[[Any, int], Tensor], *, all_of_them: bool
) -> str | None:
    """Says which micro-batch, and which module or parameter in it, is the first that is not finite.

    Runs forward and backward again, so the caller restores the random state before, and clears gradients and buffers after.
    No collective but those of the module.

    Args:
        module: the model, without a wrapper.
        micro_batches: those of the update, in order.
        loss_of: runs the forward of one of them; takes its index too.
        all_of_them: go through all, because other ranks take part in each, and not only to the first that is not finite.

    Returns:
        One line, or None if all of it is finite this time.
    """
    first: str | None = None
    for number, micro_batch in enumerate(micro_batches, start=1):
        found: list[str] = []
        check = partial(_check, found)
        for leaf in leaves(micro_batch):
            if isinstance(leaf, Tensor):
                check("the micro-batch itself", leaf)
        with torch.compiler.set_stance("force_eager"), _watched(module, check):  # a compiled module calls no new hooks
            try:
                loss = loss_of(micro_batch, number - 1)
                check("the loss", loss.detach())
                torch.autograd.backward(loss)
            except Exception as error:  # the run ends with the first error; this is about where that came from
                found.append(f"{describe_error(error)} (when run again)")
        if found and first is None:
            first = f"micro-batch {number} of {len(micro_batches)}: {found[0]}"
            if not all_of_them:
                break
    return first


def spoilt_buffer(module: nn.Module) -> str | None:
    """The name of the first buffer that has a NaN; None without one. A mask may hold infinities. Waits for the device."""
    return next((name for name, buffer in module.named_buffers() if _trouble_in(buffer) == "NaN"), None)


def _check(found: list[str], what: str, value: Tensor) -> None:
    value = sparse_gradient_values(value)
    if not found and (trouble := _trouble_in(value)) is not None:
        found.append(f"{trouble} in {what}, shape {tuple(value.shape)}")


def _trouble_in(value: Tensor) -> str | None:
    """NaN, inf, or None for a tensor that is finite, or that torch cannot tell it of."""
    has_fractions = value.is_floating_point() or value.is_complex()
    try:
        if not has_fractions or bool(torch.isfinite(value).all()):  # sync
            return None
        return "NaN" if bool(value.isnan().any()) else "inf"
    except RuntimeError:  # some layouts, dtypes and devices have no such operation; what is computed from them is checked too
        return None


@contextmanager
def _watched(module: nn.Module, check: Callable[[str, Tensor], None]) -> Iterator[None]:
    """While open, outputs of modules and gradients are checked, in the order in which they come about."""

    def watch_output(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            for output in (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)):
                check(f"the output of {name}", output.detach())
                if output.requires_grad:
                    output.register_hook(lambda gradient: check(f"the gradient of the output of {name}", gradient))  # type: ignore[no-untyped-call]

        return hook

    def watch_gradient(name: str) -> Callable[[Tensor], None]:
        return lambda gradient: check(f"the gradient of parameter {name}", gradient)

    handles: list[RemovableHandle] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()

    try:
        handles.extend(
            child.register_forward_hook(watch_output(f"module {name!r} ({type(child).__name__})" if name else "the model"))
            for name, child in module.named_modules()
        )
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        handles.extend(parameter.register_hook(watch_gradient(repr(name))) for name, parameter in trained)  # type: ignore[no-untyped-call]
        yield
    finally:
        in_full(remove)

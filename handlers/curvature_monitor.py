"""The largest eigenvalue of the loss's Hessian, by power iteration: how sharp the place is at which the weights are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from ignite.engine import Events, RemovableEventHandle
from torch import Tensor, nn

from ignite_train.arguments import describe, positive_int, real_number, whole_number
from ignite_train.device.to_device import ToDevice
from ignite_train.forward import OF_THIS_MICRO_BATCH, BoundForward, Forward, as_forward_output, bind_forward
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.micro_batch_rollback import writing_error, written_into
from ignite_train.model.reshard import is_sharded
from ignite_train.model.sparse_parameters import sparse_parameters
from ignite_train.ranks import collectives
from ignite_train.ranks.wrapping import unwrap
from ignite_train.trainer import Trainer

__all__ = ["CurvatureMonitor"]


class CurvatureMonitor(Handler):
    """Publishes the eigenvalue λ of largest magnitude of the Hessian of the loss, of each block, every 1000th update.

    `"curvature/NAME"` in `trainer.state.metrics` is λ of the second derivatives by those parameters of that block that require
    a gradient; without any it is left out. The loss is the mean over the update's micro-batches on all ranks, at the weights
    after the step. Plain gradient descent diverges along that direction where λ > 2 / learning rate. DeepSpeed's eigenvalues
    are the same, divided by the largest of all blocks. An update that has a name, see `trainer.update(..., name=...)`, may have
    another forward and is left out. An update is left out too if a micro-batch of it does not fit into memory here, in a run of
    one process; the log warns once. On several ranks the run ends by that `torch.OutOfMemoryError`, since forward may have
    collectives, in which the others would wait.

    The power iteration (G. Golub and C. Van Loan, Matrix Computations, 7.3) repeats v ← Hv / ‖Hv‖ from a random v, with λ =
    vᵀHv, until ‖Hv - λv‖ ≤ `tolerance` · |λ|. Each step of it costs a forward and two backwards of the group, reads of the
    device, and on several ranks an all-reduce of the size of the block. All that forward changes is restored, so that a run
    with it has the bits of one without; except for what forward keeps outside of the modules, and for what hooks of gradients
    do (`Tensor.register_hook`), which its backwards call too.

    Forward runs without autocast, without `torch.compile` and without the wrapper. It must be differentiable twice: fused
    attention is not, so use `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` in it. Sharded models are refused. All ranks
    must attach it.

    Args:
        forward: the function that the trainer was made with. Collectives in it must be met by equally many micro-batches.
        every: it looks after each update whose number is a multiple of this.
        blocks: modules of the model by name; None: the whole model as one, `"model"`.
        max_iterations: of the power iteration; where it ends by that, the metric is the latest λ.
        tolerance: relative, in (0, 1).
        seed: of the first v.

    Raises:
        TypeError: an argument has the wrong type, or the model is sharded.
        ValueError: a value is out of range, or a block has no parameters.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
        >>> handle = CurvatureMonitor(forward, every=2).attach(trainer)
        >>> trainer.run([torch.full((8, 1), 3.0)] * 2).metrics  # the second derivative of (3w)²
        {'curvature/model': 18.0}
    """

    not_elastic = "it would look at the samples of one replica and not at those of all"

    is_collective = True
    of_one_trainer = True

    def __init__(
        self,
        forward: Forward,
        every: int = 1000,
        *,
        blocks: Mapping[str, nn.Module] | nn.ModuleDict | None = None,
        max_iterations: int = 100,
        tolerance: float = 0.01,
        seed: int = 0,
    ) -> None:
        if not callable(forward):
            raise TypeError(f"forward must be the function that the trainer was made with, got {describe(forward)}")
        self.every, self.max_iterations = positive_int("every", every), positive_int("max_iterations", max_iterations)
        self.tolerance, self.seed = real_number("tolerance", tolerance, above=0), whole_number("seed", seed)
        if self.tolerance >= 1:
            raise ValueError(f"tolerance must be below 1, got {tolerance!r}; it is relative to the eigenvalue")
        if blocks is not None and (not isinstance(blocks, (Mapping, nn.ModuleDict)) or not blocks):
            raise TypeError(f"blocks must be modules by name, got {describe(blocks)}; leave it out for the whole model")
        self._forward = forward
        for name, block in (blocks or {}).items():
            if not isinstance(block, nn.Module):
                raise TypeError(f"blocks[{name!r}] must be a torch.nn.Module, got {describe(block)}")
            if not any(True for _ in block.parameters()):
                raise ValueError(f"blocks[{name!r}] must have parameters, and has none")
        self._blocks = None if blocks is None else dict(blocks.items())

    def attach(self, trainer: Trainer) -> RemovableEventHandle:
        """Looks after updates of `trainer`.

        Raises:
            TypeError: its model is sharded.
            ValueError: a block is not of the model, or has complex parameters, or sparse gradients, which torch cannot
                differentiate again.
        """
        model = trainer.model
        self._model = unwrap(model)
        if is_sharded(self._model):
            raise TypeError("CurvatureMonitor needs all parameters on each rank, and the model of this trainer is sharded")
        if self._blocks is None:
            self._blocks = {"model": self._model}
        own = {id(parameter) for parameter in self._model.parameters()}
        for name, block in self._blocks.items():
            if not all(id(parameter) in own for parameter in block.parameters()):
                raise ValueError(f"blocks[{name!r}] must be a module of the trainer's model, got another one")
        self._trained()
        self._transfer = ToDevice(next(self._model.parameters()).device)
        self._forward_state = ForwardState(self._model, trainer.state.carried, self._forward)
        self._bound: BoundForward = bind_forward(self._forward, lambda: trainer.state)
        return trainer.prepend_event_handler(Events.ITERATION_COMPLETED(every=self.every), self)  # before loggers

    def __call__(self, trainer: Trainer) -> None:
        """Computes and publishes; a value that is not finite is left out.

        Raises:
            ValueError: forward writes into its micro-batch, or what was thawed since `attach` would have been refused there.
            torch.OutOfMemoryError: a micro-batch does not fit into memory here, on one of several ranks.
        """
        record = trainer.state.update_output
        for name, parameters in self._trained().items():
            trainer.state.metrics.pop(f"curvature/{name}", None)
            if parameters and record is not None and record.name is None:
                value = self._largest_eigenvalue(trainer, parameters)
                if math.isfinite(value):
                    trainer.state.metrics[f"curvature/{name}"] = value

    def _trained(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of each block that require a gradient now: a handler may freeze or thaw some in the run."""
        blocks = (self._blocks or {}).items()
        trained = {name: [one for one in block.parameters() if one.requires_grad] for name, block in blocks}
        sparse, names = sparse_parameters(self._model), {id(one): name for name, one in self._model.named_parameters()}
        for one in (one for parameters in trained.values() for one in parameters):
            if one in sparse:
                raise ValueError(
                    f"blocks must have dense gradients, got {sparse[one]!r} of an embedding with sparse=True; build it with "
                    "sparse=False, or pass blocks= without it"
                )
            if one.is_complex():
                raise ValueError(
                    f"blocks must have real parameters, got {names[id(one)]!r} of {one.dtype}; pass blocks= without it"
                )
        return trained

    def _largest_eigenvalue(self, trainer: Trainer, parameters: Sequence[nn.Parameter]) -> float:
        generator = torch.Generator().manual_seed(self.seed)
        direction = torch.cat([torch.randn(p.numel(), generator=generator, dtype=p.dtype).to(p.device) for p in parameters])
        direction, value = direction / direction.norm(), 0.0
        for _ in range(self.max_iterations):
            product = self._times_hessian(trainer, parameters, direction)
            numbers = torch.stack([torch.sum(product * other, dtype=torch.float64) for other in (direction, product)])
            value, length_squared = numbers.tolist()  # sync
            residual_squared = length_squared - value**2  # of v of length 1
            if not residual_squared > (self.tolerance * value) ** 2:  # also where it is NaN
                break
            direction = product / math.sqrt(length_squared)
        return value

    def _times_hessian(self, trainer: Trainer, parameters: Sequence[nn.Parameter], direction: Tensor) -> Tensor:
        """Hv of the mean loss over the micro-batches of all ranks; leaves no trace."""
        state, before = trainer.state, self._forward_state.mark()
        total, sample_size = torch.zeros_like(direction), 0.0
        # The denominators of the terms, of which each is divided by its own over all micro-batches.
        totals = (state.update_output.sample_sizes if state.update_output else {}) or OF_THIS_MICRO_BATCH
        try:
            for index, micro_batch in enumerate(state.batch):
                if micro_batch is None:  # without samples
                    continue
                state.micro_batch_in_group, is_written = index, written_into(micro_batch)
                with torch.compiler.set_stance("force_eager"):
                    returned = self._bound(self._model, self._transfer(micro_batch))
                output = as_forward_output(returned, totals)
                if is_written():  # the update has run on other values, and the next product would be another one
                    raise writing_error("CurvatureMonitor runs forward on each micro-batch again")
                sample_size += float(output.sample_size)  # sync
                _add_product(total, output.loss, parameters, direction)
        except torch.OutOfMemoryError as error:  # the update may have recovered from it, or needed less memory
            if collectives.world_size() > 1:
                raise  # the others may wait in a collective of forward
            error.__traceback__ = None  # its frames hold the graph
            sample_size = math.nan  # which makes the value NaN, and NaN is left out
            if "curvature" not in trainer.progress.warned:
                trainer.progress.warned.add("curvature")
                trainer.logger.warning(
                    f"CurvatureMonitor leaves out its value after update {state.iteration}, and after later ones like it: a "
                    "micro-batch did not fit into memory there; make micro-batches smaller to have it"
                )
        finally:
            state.micro_batch_in_group = None
            self._forward_state.put_back(before)
        collectives.sum_over_ranks(total)
        return total / collectives.total([sample_size])[0]  # NaN without samples


def _add_product(total: Tensor, loss: Tensor, parameters: Sequence[nn.Parameter], direction: Tensor) -> None:
    """Adds the derivative of ∇loss · direction, which is H · direction; zero where the loss is linear."""
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    slope = torch.dot(torch.cat([gradient.reshape(-1) for gradient in gradients]), direction)
    if slope.requires_grad:
        products = torch.autograd.grad(slope, parameters, materialize_grads=True)
        total += torch.cat([product.reshape(-1) for product in products])

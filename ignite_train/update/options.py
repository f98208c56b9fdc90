"""The rare settings of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from ignite_train.arguments import describe, one_of, positive_int
from ignite_train.data.grouping import POLICIES
from ignite_train.data.micro_batch_pass import Uneven
from ignite_train.other_words import answers_other_words
from ignite_train.ranks.data_ranks import checked_data_dims
from ignite_train.ranks.wrapping import ReductionName
from ignite_train.update.loss_terms import SampleSizes

__all__ = ["RARE_SETTINGS", "UpdateOptions"]

OnOutOfMemory = Literal["raise", "skip", "split"]


@answers_other_words
@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """The rare settings of an update; `create_trainer` and `create_supervised_trainer` take them as `options=`.

        trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(on_nonfinite="skip", give_up_after=5))

    Attributes:
        reduction: how gradients cross ranks. `"auto"` is what the model is wrapped for; `"explicit"` sums those of plain
            replicas after the last backward, which `"auto"` does for a very small DistributedDataParallel too; `"ddp"` and
            `"fsdp"` insist on the hooks of the wrapper. `"local"` leaves them on their rank: each replica steps along the mean
            over its own samples, for `OuterOptimizer` to make them equal again. Loss, logs, stops and the loss scale are those
            of all ranks; a rank whose gradients are not finite skips alone. `"elastic"` is for replicas that come and go, on
            torchft; docs/elastic.md says what it needs.
        uneven: what ranks with different numbers of micro-batches do. `"all"`: each micro-batch is used, and ranks that ran
            out take part with no weight. `"shortest"`: all stop when the first rank has run out. `"error"`: different numbers
            are an error. A `forward` with collectives of its own hangs with `"all"`. For it `"shortest"` is exact; `"replay"`
            uses each micro-batch, and ranks that ran out run forward on a placeholder without weight, which enters the other
            ranks' losses through these collectives.
        on_nonfinite: without loss scaling, what a non-finite gradient or loss does on all ranks: `"raise"` a
            `NonFiniteError` or `"skip"` the update. The parameters are untouched either way.
        on_out_of_memory: what a `torch.OutOfMemoryError` in forward or backward of one rank does. `"raise"`: it is raised.
            `"skip"`: the micro-batch gets weight zero. `"split"`: it is halved along its first dimension and tried again,
            which needs a loss that is a sum, with its `sample_size`. Both need a single process or `reduction="explicit"`; a
            hook of `register_post_accumulate_grad_hook` finds in `.grad` what the micro-batch adds, not the sum so far.
            The error is known by its type: for others that mean the same, such as the `RuntimeError` of the CPU allocator,
            have `forward` catch them and raise a `torch.OutOfMemoryError`.
        give_up_after: this many updates in a row that are skipped because they are not finite, or that run out of memory, end
            the run with a `GaveUpError` on all ranks; None never gives up. An overflow counts only if it left the loss scale
            where it was, as with `StaticLossScaling` and with `on_floor="hold"` at the floor: a high first scale may fall as
            often as it must. An update without samples does not end the row. A resumed run continues the count.
        retain_graph: keep the graph of each micro-batch after its backward. Not with `compile`, but for `compiled_autograd`.
        create_graph: make gradients differentiable, for handlers of BACKWARD_COMPLETED; they are detached before the next
            micro-batch, and before the step. An optimizer that differentiates them in its step, as AdaHessian does, needs
            `closure=True` too. Not on several ranks.
        compiled_autograd: trace and compile backward too, with the options of `compile`. Not in DistributedDataParallel.
        closure: give the optimizer's `step` torch's closure, as LBFGS, SAM and their like need it: forward and backward over
            the group again, with the same weights, reduction and clipping, returning the mean loss. `"replay"` starts each
            evaluation from what the first one started from (random numbers, buffers, attributes of modules, parameters that
            forward moves), and the others leave no trace in them; with True each draws its own. Parameters and the optimizer's
            state are copied in each update, and restored if an evaluation is not finite. One optimizer, not in `fully_shard`.
            Optimizers that need none, such as AdamW, evaluate it once more too.
        keep_gradients: let loggers read `.grad` after the update. After a step it is the clipped mean gradient, until the next
            update begins; after a skip it is None. Costs the memory of the gradients between updates.
        normalize: divide gradients by Σsample_size. False steps along Σ∇loss, and `grad_norm` and `trainer.gradients()` are
            those of the sum; loss and logs are reported per sample all the same.
        drop_last_group: leave out the last group of an epoch if it has fewer than `accumulation_steps` micro-batches, on the
            rank that has the most of them, as fairseq's `skip_remainder_batch` does. They are read and dropped. Without a
            length several ranks read a whole group ahead.
        train_mode: put the model into training mode before each update, if its root module is in eval mode; a warning says so
            if the script had put all of it into eval mode. False leaves all modes as the script has set them, as linear probes
            and fine-tuning with frozen statistics need it. Modules outside of the model keep their modes anyway, such as a
            teacher in eval mode.
        none_is_empty: take a None from the loader for a micro-batch without samples, as fairseq does for empty shards. It keeps
            its place in its group, so that ranks stay in step, and forward does not see it. An update of nothing else is
            skipped. Without this a None is an error.
        sample_sizes: a function that counts the samples of each term of a loss that is a mapping, see `ForwardOutput`:
            `sample_sizes(micro_batch)` returns `{"mlm": n, "nsp": m}`, of a micro-batch as the loader gives it. It is asked for
            the whole group before its first forward, so all of it is read before, and the numbers are reduced over the ranks in
            one small collective. An update of one micro-batch on one rank, which is not to be split, needs no
            function. Not with `normalize=False`, `on_out_of_memory="skip"` or `reduction="local"`; `compile="update"` compiles
            no more than True then.
        data_dims: of a model whose parameters are DTensors on a mesh, the names of the dimensions over which samples differ,
            such as `("dp",)`, or `("dp", "cp")` where each rank of a context-parallel group adds up the loss of its own tokens.
            Ranks that differ in other dimensions only are fed the same micro-batches, and count them once. Found where
            `fully_shard` alone has made the DTensors, over all ranks; required elsewhere; `()` if all ranks are fed the same.
        reduce_each_micro_batch: have `fully_shard` reduce the gradients in the backward of each micro-batch, so that a rank
            keeps its shards of them between micro-batches and not the whole. It costs a reduction for each further
            micro-batch, and the ranks must use the same parameters in each.
        fast: use the accelerations that change no result beyond the rounding of one multiplication: a fused optimizer divides
            the gradients inside its kernel, which is called directly; on an accelerator a step is queued before the host has
            read the update's numbers; `compile="update"`. False takes the plain way, which is what they are compared with; so
            does the environment variable `IGNITE_TRAIN_FAST=0`.

    Raises:
        TypeError: a value is of the wrong type.
        ValueError: a value is out of range.
    """

    reduction: ReductionName = "auto"
    uneven: Uneven = "all"
    on_nonfinite: Literal["raise", "skip"] = "raise"
    on_out_of_memory: OnOutOfMemory = "raise"
    give_up_after: int | None = 20
    retain_graph: bool = False
    create_graph: bool = False
    compiled_autograd: bool = False
    closure: bool | Literal["replay"] = False
    keep_gradients: bool = False
    normalize: bool = True
    drop_last_group: bool = False
    train_mode: bool = True
    none_is_empty: bool = False
    sample_sizes: SampleSizes | None = None
    data_dims: Sequence[str] | None = None
    reduce_each_micro_batch: bool = False
    fast: bool = True

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, get_args(ReductionName))
        one_of("uneven", self.uneven, POLICIES)
        one_of("on_nonfinite", self.on_nonfinite, ("raise", "skip"))
        one_of("on_out_of_memory", self.on_out_of_memory, get_args(OnOutOfMemory))
        if not isinstance(self.closure, bool):
            one_of("closure", self.closure, ("replay",))
        if self.closure and self.on_out_of_memory != "raise":
            raise ValueError(
                f"on_out_of_memory must be 'raise' with closure, got {self.on_out_of_memory!r}: each evaluation needs the "
                "whole group"
            )
        if self.sample_sizes is not None:
            self._check_sample_sizes()
        checked_data_dims(self.data_dims)
        if self.give_up_after is not None:
            positive_int("give_up_after", self.give_up_after)
        for name, value in vars(self).items():
            if type(self).__annotations__[name] == "bool" and not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {describe(value)}")

    def _check_sample_sizes(self) -> None:
        if not callable(self.sample_sizes):
            raise TypeError(f"sample_sizes must be a function that returns numbers by name, got {describe(self.sample_sizes)}")
        if not self.normalize:
            raise ValueError("normalize must be True with sample_sizes, by which each loss is divided, got False")
        if self.reduction == "local":
            raise ValueError(
                "reduction must not be 'local' with sample_sizes, whose numbers are those of all ranks, while each rank "
                "divides by its own; use another reduction, or one loss"
            )
        if self.on_out_of_memory == "skip":
            raise ValueError(
                "on_out_of_memory must be 'raise' or 'split' with sample_sizes, got 'skip': the samples of a micro-batch that "
                "is left out have been counted"
            )


# Where each of them is given, for those who look for it among the arguments of `create_trainer`.
RARE_SETTINGS = {field.name: f"options=UpdateOptions({field.name}=...)" for field in fields(UpdateOptions)}

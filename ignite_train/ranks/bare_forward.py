"""The forward of a `DistributedDataParallel` whose gradients something else reduces: that of the module inside, and no more."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch.nn.parallel import DistributedDataParallel

__all__ = ["BareForward"]


class BareForward:
    """A context in which a call of the wrapper runs its hooks and the module inside, as under `no_sync`, in less time.

    Under `no_sync` the forward of the wrapper does nothing but call the module, and still asks a dozen questions and opens two
    contexts in each micro-batch. On a small network that takes as long as a layer. It is left out where the answers are known:
    the wrapper has neither inputs to move nor buffers to broadcast, reduces all parameters at once, and has torch's own
    forward. Elsewhere this is `no_sync`.

    Neither alone keeps the wrapper from reducing: a forward outside of it has made the hooks wait for a backward, and they take
    the next one for it. So both begin with `disarm`.

    Args:
        ddp: the wrapper; without buffers to broadcast, and of full precision.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp, self._attributes, self._call = ddp, vars(ddp), _CallOfModule(ddp)
        self._is_plain = (
            type(ddp).forward is _FORWARD
            and self._attributes.get("device_ids", ()) is None
            and self._attributes.get("_delay_all_reduce_all_params") is False
            and self._attributes.get("_use_python_reducer") is False
        )
        self._no_sync: Any = None  # the open context of the wrapper

    def disarm(self) -> None:
        """Has the hooks of the wrapper wait for no backward, until its next forward outside of this context.

        A forward with gradients has them reduce in the next backward on this rank, whichever that is. The buckets are laid out
        once more in the second of such forwards, by a broadcast. So all ranks disarm alike.

        Raises:
            RuntimeError: torch's own, as in the next forward of the wrapper: it has the gradients of some parameters only and
                waits for those of others.
        """
        reducer = self._attributes.get("reducer")
        if reducer is not None:
            reducer._check_reducer_finalized()
            reducer._reset_state()

    def __enter__(self) -> None:
        self.disarm()
        attributes = self._attributes
        has_begun = attributes.get("_lazy_init_ran") and not attributes["_join_config"].enable
        is_another = "forward" in attributes or attributes.get("_compiled_call_impl") is not None
        if self._is_plain and has_begun and not is_another:
            attributes["forward"] = self._call
        else:
            self._no_sync = self._ddp.no_sync()
            self._no_sync.__enter__()

    def __exit__(self, *raised: Any) -> None:
        no_sync, self._no_sync = self._no_sync, None
        if no_sync is None:
            del self._attributes["forward"]
        else:
            no_sync.__exit__(*raised)


_FORWARD = DistributedDataParallel.forward


class _CallOfModule:
    """The forward of `ddp` meanwhile. A copy of the wrapper that is made meanwhile, or a pickle, has torch's forward again."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._ddp.module(*inputs, **kwargs)

    def __reduce__(self) -> Any:
        return _torchs_forward, (self._ddp,)


def _torchs_forward(ddp: DistributedDataParallel) -> MethodType:
    return MethodType(_FORWARD, ddp)

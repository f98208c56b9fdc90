"""The processes on which tests run their ranks."""

from __future__ import annotations

import ignite.distributed as idist
import pytest

from ranks import Ranks, RanksFailedError


@pytest.mark.slow
def test_a_rank_that_was_killed_is_a_failure_and_is_replaced() -> None:
    """Also one that is dead before it is asked."""
    with Ranks() as ranks:
        assert ranks.run(idist.get_rank) == [0, 1]
        ranks._processes[1].kill()
        ranks._processes[1].join()
        with pytest.raises(RanksFailedError, match="rank 1: died without a word"):
            ranks.run(idist.get_rank)
        assert ranks.run(idist.get_rank) == [0, 1]

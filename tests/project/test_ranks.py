"""The processes on which tests run their ranks."""

from __future__ import annotations

import os
import signal

import ignite.distributed as idist
import pytest

from ranks import Ranks, RanksFailedError, run_ranks


@pytest.mark.slow
def test_a_rank_that_was_killed_is_a_failure_and_is_replaced() -> None:
    """Also one that is dead before it is asked."""
    with Ranks() as ranks:
        assert ranks.run(idist.get_rank) == [0, 1]
        ranks._processes[1].kill()
        ranks._processes[1].join()
        with pytest.raises(RanksFailedError, match="rank 1: died without a word, with exit code -9"):
            ranks.run(idist.get_rank)
        assert ranks.run(idist.get_rank) == [0, 1]


def crash_on_rank_1() -> None:
    if idist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.slow
def test_a_rank_that_crashes_says_where_it_was() -> None:
    """With its exit code and the functions of all its threads."""
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1: died without a word, with exit code -11\n.* in crash_on_rank_1\n"):
        run_ranks(crash_on_rank_1)

"""Each replica gets the cores and the environment that the plan was measured with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchproof.serve.threads import set_thread_variables, share_cores, thread_variables


def test_the_plans_thread_count_counts_and_the_users_wait_policy_stays() -> None:
    """The count is what was measured, whatever the environment says; how idle threads wait is the user's."""
    environ = {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "8", "HOME": "/root"}
    set_thread_variables(2, environ)
    assert environ == {
        "OMP_WAIT_POLICY": "active",
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "2",
        "HOME": "/root",
    }


def test_without_a_count_the_default_stays_with_idle_threads_asleep() -> None:
    assert thread_variables(0, {}) == {"OMP_WAIT_POLICY": "passive"}
    assert thread_variables(0, {"OMP_WAIT_POLICY": "active"}) == {}


def test_a_library_that_the_user_has_limited_stays_limited() -> None:
    assert "OPENBLAS_NUM_THREADS" not in thread_variables(4, {"OPENBLAS_NUM_THREADS": "1"})


def test_asking_changes_nothing() -> None:
    environ: dict[str, str] = {}
    thread_variables(2, environ)
    assert environ == {}


@pytest.mark.parametrize(
    ("num_threads", "num_replicas", "cores"),
    [
        (2, None, [(0, 1), (2, 3), (4, 5)]),  # as many as there is room for
        (4, None, [(0, 1, 2, 3, 4, 5)]),  # one, and what is over is its own
        (0, None, [(0, 1, 2, 3, 4, 5)]),
        (9, None, [(0, 1, 2, 3, 4, 5)]),
        (1, 2, [(0, 1, 2), (3, 4, 5)]),
        (2, 4, [(0,), (1,), (2,), (3,)]),
        (0, 1, [(0, 1, 2, 3, 4, 5)]),
        (1, 8, [(0,), (1,), (2,), (3,), (4,), (5,), (0,), (1,)]),  # more than cores: they share
    ],
)
def test_who_gets_which_cores(num_threads: int, num_replicas: int | None, cores: list[tuple[int, ...]]) -> None:
    assert share_cores(range(6), num_threads, num_replicas) == cores


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=64, unique=True),
    st.integers(0, 70),
    st.none() | st.integers(1, 80),
)
def test_cores_are_shared_only_where_there_are_too_few(
    core_ids: list[int], num_threads: int, num_replicas: int | None
) -> None:
    """Each has some, all as many, no core twice; the least used one as often as the most used one, but for one."""
    shared = share_cores(core_ids, num_threads, num_replicas)
    assert num_replicas is None or len(shared) == num_replicas
    assert len({len(cores) for cores in shared}) == 1
    assert shared[0]
    used = [core for cores in shared for core in cores]
    assert set(used) <= set(core_ids)
    counts = [used.count(core) for core in core_ids]
    assert max(counts) <= 1 + (len(shared) - 1) // len(core_ids)
    if num_replicas is None and num_threads:
        assert len(shared[0]) >= min(num_threads, len(core_ids))

"""The environment variables that steer a process's threads. They work only when set before torch is imported."""


def thread_environment(num_threads: int) -> dict[str, str]:
    """Variables for a process with so many intra-op threads, whose idle threads sleep.

    By default idle OpenMP threads spin. Beside one busy neighbour that made inference up to 47 times slower (measured,
    two threads on two cores); asleep they cost nothing measurable.
    """
    threads = str(num_threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}

"""Limits are found wherever a container runtime puts them, and never where there is none."""

from pathlib import Path

import pytest

from torchproof.machine import cgroup

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


V2 = {"proc/self/cgroup": "0::/pod/app"}
V1 = {"proc/self/cgroup": "4:memory:/pod/app\n2:cpu,cpuacct:/pod/app\n1:name=systemd:/init"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({**V2, "sys/fs/cgroup/pod/app/cpu.max": "150000 100000"}, 1.5),
        ({**V2, "sys/fs/cgroup/pod/app/cpu.max": "max 100000"}, None),
        # an ancestor's limit holds too, and the smaller wins
        ({**V2, "sys/fs/cgroup/pod/app/cpu.max": "400000 100000", "sys/fs/cgroup/pod/cpu.max": "50000 100000"}, 0.5),
        # inside a cgroup namespace the group is the mount's top
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        # the path is the host's, the mount is the container's
        ({**V2, "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        ({"proc/self/cgroup": "0::/../other", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/pod/app/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/pod/app/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/pod", "sys/fs/cgroup/unified/pod/cpu.max": "100000 100000"}, 1.0),
        ({**V2, "sys/fs/cgroup/pod/app/cpu.max": ""}, None),
        ({}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cgroup.cpu_quota(tree(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({**V2, "sys/fs/cgroup/pod/app/memory.max": str(8 * GIB)}, 8 * GIB),
        ({**V2, "sys/fs/cgroup/pod/app/memory.max": "max"}, None),
        ({**V2, "sys/fs/cgroup/pod/app/memory.max": "max", "sys/fs/cgroup/pod/memory.max": str(GIB)}, GIB),
        ({**V1, "sys/fs/cgroup/memory/pod/app/memory.limit_in_bytes": str(2 * GIB)}, 2 * GIB),
        ({**V1, "sys/fs/cgroup/memory/pod/app/memory.limit_in_bytes": "9223372036854771712"}, None),
        ({}, None),
    ],
)
def test_memory_limit(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    assert cgroup.memory_limit(tree(tmp_path, files)) == limit


def test_headroom_counts_file_cache_as_free(tmp_path: Path) -> None:
    files = {
        **V2,
        "sys/fs/cgroup/pod/app/memory.max": str(8 * GIB),
        "sys/fs/cgroup/pod/app/memory.current": str(7 * GIB),
        "sys/fs/cgroup/pod/app/memory.stat": f"anon {4 * GIB}\ninactive_file {3 * GIB}",
    }
    assert cgroup.memory_headroom(tree(tmp_path, files)) == 4 * GIB


def test_no_headroom_without_a_limit(tmp_path: Path) -> None:
    files = {**V2, "sys/fs/cgroup/pod/app/memory.max": "max", "sys/fs/cgroup/pod/app/memory.current": str(GIB)}
    assert cgroup.memory_headroom(tree(tmp_path, files)) is None

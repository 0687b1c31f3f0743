"""What bench/serve.py stores of its rounds, and the tables that it makes of them."""

import json
from collections.abc import Callable, Sequence
from statistics import median

from torchproof.render import units
from torchproof.stats import median_interval
from torchproof.stats.paired import CONFIDENCE
from torchproof.types import Environment, Record

CLOSED = {"minilm1": 1, "minilm8": 8, "minilm32": 32, "mlp1": 1, "mlp32": 32, "clients256": 256}
POISSON = "minilm-poisson"
OURS = ("torchproof", "torchproof-bundle")
PEER_ROWS = tuple(f"{peer}{row}" for peer in ("fastapi", "litserve", "bentoml") for row in ("", "-omp1"))
IN_PROCESS = "in-process"  # a row of mlp1: the model without any server
POISSON_LOAD = 0.6  # of the best peer's capacity
OVERLOAD, OVERLOAD_S = 5.0, 10.0
LARGE = json.dumps({"text": "word " * 1_000_000}).encode()
LARGE_EVERY_S, SMALL_CLIENTS, RSS_EVERY_S = 0.5, 4, 0.05


class Round(Record):
    """One server under load once. Latencies are those of the answers with status 200; ``inf`` where there was none.

    Attributes:
        turn: rounds of one case and turn were taken next to each other.
        neighbour: a busy process ran beside it.
        load: the machine's 1-minute load average.
        client_cpu: share of one core that the load took; near 1 the client is what is measured.
    """

    case: str
    server: str
    neighbour: bool
    turn: int
    throughput_rps: float
    p50_s: float
    p99_s: float
    num_requests: int
    num_errors: int
    load: float
    client_cpu: float


class Overload(Record):
    """Requests that arrive faster than they can be answered.

    Attributes:
        answered: share of the requests with an answer, of any status, within the deadline.
        goodput: answers with status 200 a second, over the capacity.
    """

    server: str
    neighbour: bool
    capacity_rps: float
    deadline_s: float
    num_requests: int
    answered: float
    goodput: float
    p99_s: float
    statuses: dict[str, int]
    client_cpu: float


class Large(Record):
    """5 MB in one request, again and again, while small ones run. Memory is the RSS of all its processes together."""

    server: str
    neighbour: bool
    statuses: dict[str, int]
    rss_before: int
    rss_peak: int
    rss_after: int
    p99_without_s: float
    p99_with_s: float
    num_small_errors: int


class Results(Record):
    """What a run of this file stores."""

    created: str
    environment: Environment
    versions: dict[str, str]
    rounds: tuple[Round, ...]
    overloads: tuple[Overload, ...]
    larges: tuple[Large, ...]


def table(results: Results) -> str:
    e = results.environment
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    lines = [
        "# torchproof serve beside other servers",
        "",
        f"Written by `python -m bench.serve` on {results.created}: {e.cpu_model}, {e.num_cores} cores, Python "
        f"{e.python}, torch {e.versions.get('torch')}, {versions}. The load runs on the same machine. Medians of "
        f"interleaved rounds; every answer was compared with the model's own. `-omp1`: with OMP_NUM_THREADS=1. "
        "`load` is the range of the 1-minute load average, `client` the largest share of a core that the load took.",
        "",
        "MiniLM gets real texts of mixed lengths; `minilm8` is 8 clients that each wait for their answer, "
        f"`{POISSON}` arrivals at {POISSON_LOAD:.0%} of what the best peer can do.",
    ]
    for neighbour in sorted({r.neighbour for r in results.rounds}):
        rounds = [r for r in results.rounds if r.neighbour == neighbour]
        lines += ["", "## Beside one busy process" if neighbour else "## By themselves", ""]
        lines += [
            "| case | server | throughput | p50 | p99 | errors | load | client |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for case in dict.fromkeys(r.case for r in rounds):
            for name in dict.fromkeys(r.server for r in rounds if r.case == case):
                lines.append(_medians(_of(rounds, case, name)))
        lines += [
            "",
            "Against the best peer of each measure; above 1 ours is better. Intervals are the median's, at 98.75%.",
            "",
            "| case | server | throughput | p50 | p99 |",
            "|---|---|---|---|---|",
        ]
        lines += _against_peers(rounds)
        lines += _overheads(rounds)
    lines += _extremes(results)
    return "\n".join(lines) + "\n"


def _of(rounds: Sequence[Round], case: str, server: str) -> list[Round]:
    return sorted((r for r in rounds if (r.case, r.server) == (case, server)), key=lambda r: r.turn)


def _medians(own: Sequence[Round]) -> str:
    def middle(value: Callable[[Round], float]) -> float:
        return median(value(r) for r in own)

    loads = [r.load for r in own]
    cells = [own[0].case, own[0].server, units.rate(middle(lambda r: r.throughput_rps))]
    cells += [units.seconds(middle(lambda r: r.p50_s)), units.seconds(middle(lambda r: r.p99_s))]
    cells += [str(sum(r.num_errors for r in own)), f"{min(loads):.1f}-{max(loads):.1f}"]
    return f"| {' | '.join([*cells, f'{max(r.client_cpu for r in own):.2f}'])} |"


MEASURES: dict[str, Callable[[Round], float]] = {
    "throughput": lambda r: 1 / max(r.throughput_rps, 1e-3),  # a round without an answer
    "p50": lambda r: r.p50_s,
    "p99": lambda r: r.p99_s,
}


def _against_peers(rounds: Sequence[Round]) -> list[str]:
    lines = []
    for case in dict.fromkeys(r.case for r in rounds):
        peers = [_of(rounds, case, name) for name in PEER_ROWS if _of(rounds, case, name)]
        for own in (_of(rounds, case, name) for name in OURS):
            if not own or not peers:
                continue
            cells = []
            for value in MEASURES.values():
                best = min(peers, key=lambda peer: median(map(value, peer)))
                ratios = [value(b) / value(o) for b, o in zip(best, own, strict=True)]
                cells.append(f"{units.ratio(*median_interval(ratios, CONFIDENCE))} ({best[0].server})")
            lines.append(f"| {case} | {own[0].server} | {' | '.join(cells)} |")
    return lines


def _overheads(rounds: Sequence[Round]) -> list[str]:
    base = _of(rounds, "mlp1", IN_PROCESS)
    lines = ["", "What a server adds to the median call in the process (JSON, tensor, model, JSON), one client:", ""]
    for name in (*OURS, *PEER_ROWS) if base else ():
        if own := _of(rounds, "mlp1", name):
            added = median_interval([o.p50_s - b.p50_s for o, b in zip(own, base, strict=True)], CONFIDENCE)
            lines.append(f"- {name}: {units.seconds(*added)}")
    return lines if base else []


def _extremes(results: Results) -> list[str]:
    lines = []
    if results.overloads:
        lines += [
            "",
            "## Overload",
            "",
            f"Arrivals at {OVERLOAD:.0f} times the capacity. `answered`: with any status within the deadline. "
            "`goodput`: answers with status 200 a second over the capacity; `client`: the share of a core that the "
            "load took, of those that served before.",
            "",
            "| server | neighbour | capacity | requests | answered | goodput | p99 of the 200s | client | statuses |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
    for o in results.overloads:
        cells = [o.server, "yes" if o.neighbour else "no", units.rate(o.capacity_rps), f"{o.num_requests:,}"]
        cells += [f"{o.answered:.2%}", f"{o.goodput:.0%}", units.seconds(o.p99_s), f"{o.client_cpu:.2f}"]
        cells.append(_counts(o.statuses))
        lines.append(f"| {' | '.join(cells)} |")
    if results.larges:
        lines += [
            "",
            f"## {len(LARGE) / 1e6:.0f} MB in one request",
            "",
            f"Every {LARGE_EVERY_S} s, beside {SMALL_CLIENTS} clients with small requests. Memory (RSS) is that of all "
            "processes.",
            "",
            "| server | neighbour | statuses | memory, peak | memory, after | small p99 without | with | errors |",
            "|---|---|---|---|---|---|---|---|",
        ]
    for g in results.larges:
        cells = [g.server, "yes" if g.neighbour else "no", _counts(g.statuses)]
        cells += [f"{(size - g.rss_before) / 2**20:+.1f} MiB" for size in (g.rss_peak, g.rss_after)]
        cells += [units.seconds(g.p99_without_s), units.seconds(g.p99_with_s), str(g.num_small_errors)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _counts(statuses: dict[str, int]) -> str:
    return ", ".join(f"{status}: {number:,}" for status, number in statuses.items())

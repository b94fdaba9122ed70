"""Chooses how many threads compute on a CPU, and lets them sleep while they wait for each other.

By default torch takes a thread for each core, and a thread that waits for the others spins. Where other work runs on
the same cores, the spinning threads keep the late ones from running, and a step takes ten times as long.

Both settings are environment variables of OpenMP, which torch reads when it is loaded and child processes inherit.
"""

import logging
import os
import time
from pathlib import Path

COUNT = "OMP_NUM_THREADS"
WAITING = "OMP_WAIT_POLICY"
SAMPLE_SECONDS = 0.25
_STATISTICS = Path("/proc/stat")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

logger = logging.getLogger(__name__)


def choose_threads(argv: list[str]) -> None:
    """Set OMP_NUM_THREADS to the free cores of each rank, and OMP_WAIT_POLICY to passive. What the user set stays.

    Free are the cores that this process may use, as far as its cgroup's quota reaches, minus those that were busy
    during SAMPLE_SECONDS.

    Args:
        argv: the server's command line; its ranks share the free cores.
    """
    os.environ.setdefault(WAITING, "passive")
    if COUNT in os.environ:
        return
    cores = os.sched_getaffinity(0)
    allowed = min(len(cores), _quota())
    busy = _busy(cores)
    ranks = _ranks(argv)
    threads = max(1, round(allowed - busy) // ranks)
    os.environ[COUNT] = str(threads)
    # A warning, because logging is not configured yet and hides everything below. Tools that serve nothing stay quiet.
    serves = option_value(argv, "--model-path", "--model") is not None or argv[:1] == ["serve"]
    logger.log(
        logging.WARNING if serves and threads * ranks < len(cores) else logging.INFO,
        "CPU threads per rank: %d (ranks: %d). This process may use %.3g of %d cores, of which %.1f are busy. "
        "Set %s to choose another number.",
        threads, ranks, allowed, len(cores), busy, COUNT,
    )  # fmt: skip


def _quota() -> float:
    """Return the cores that the cgroup grants; infinite without a limit."""
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)


def _busy(cores: set[int]) -> float:
    """Return how many of `cores` were busy during a sample of SAMPLE_SECONDS; 0 if the system does not say."""
    before = _times()
    time.sleep(SAMPLE_SECONDS)
    after = _times()
    occupied = 0.0
    for core in cores & before.keys() & after.keys():
        idle, total = (now - then for now, then in zip(after[core], before[core]))
        occupied += 1 - idle / total if total > 0 else 0
    return occupied


def _times() -> dict[int, tuple[int, int]]:
    """Return the idle time and the total time of each core, in clock ticks since the system started."""
    try:
        lines = _STATISTICS.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            # user nice system idle iowait irq softirq steal; what follows is counted in user and nice already.
            ticks = [int(value) for value in values[:8]]
            found[int(name[3:])] = sum(ticks[3:5]), sum(ticks)
    return found


def _ranks(argv: list[str]) -> int:
    """Return the number of processes among which the command line divides the model or its requests."""
    ranks = 1
    for names in (("--tp-size", "--tensor-parallel-size", "--tp"), ("--dp-size", "--data-parallel-size", "--dp"),
                  ("--pp-size", "--pipeline-parallel-size", "--pp")):  # fmt: skip
        value = option_value(argv, *names)
        ranks *= int(value) if value and value.isdecimal() and int(value) else 1
    return ranks


def option_value(argv: list[str], *names: str) -> str | None:
    """Return the value that a command line gives to an option, or None. The last one counts, as in argparse.

    Args:
        argv: the command line without the program.
        names: spellings of the option.
    """
    value = None
    for position, word in enumerate(argv):
        if word in names and position + 1 < len(argv):
            value = argv[position + 1]
        elif word.partition("=")[0] in names and "=" in word:
            value = word.partition("=")[2]
    return value

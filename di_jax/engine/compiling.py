"""Compilations side by side, with a progress bar."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tqdm import tqdm

logger = logging.getLogger(__name__)

# XLA's lowering recurses deeper than the 8 MB default stack of a thread on large models.
COMPILE_STACK_BYTES = 64 * 2**20
MOST_WORKERS = 8  # each compilation of a large step takes some GB


def compile_workers() -> int:
    """Compilations at a time: half the cores, as XLA uses some more than one for each; 2 to MOST_WORKERS."""
    return max(2, min(MOST_WORKERS, (os.cpu_count() or 2) // 2))


def compile_together[Compiled](jobs: Sequence[Callable[[], Compiled]], workers: int | None = None) -> list[Compiled]:
    """The results of `jobs`, each of which compiles a step, run in threads with a progress bar.

    workers: at a time; by default `compile_workers`.

    An error or an interrupt drops what no thread has begun and is raised at once; XLA cannot be stopped inside a
    compilation, so those in flight end in the background and keep the process until then.
    """
    workers = compile_workers() if workers is None else workers
    previous = threading.stack_size(COMPILE_STACK_BYTES)
    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(job) for job in jobs]
        with tqdm(total=len(jobs), desc="compiling", unit="step", disable=None, file=sys.stderr) as bar:
            for future in as_completed(futures):
                future.result()
                bar.update()
        return [future.result() for future in futures]
    except BaseException:
        logger.warning("warm-up was cut short: the steps in flight (%d at most) are compiled to the end", workers)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        threading.stack_size(previous)

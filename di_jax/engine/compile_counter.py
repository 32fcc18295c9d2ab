"""Counts XLA compilations of this process: after warm-up a run compiles nothing (field-pains, recompilation)."""

from __future__ import annotations

import threading

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Number of backend compilations since `reset`. One listener for the process; JAX offers no way to remove one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            with self._lock:
                self._count += 1

    @property
    def count(self) -> int:
        return self._count


COMPILATIONS = CompileCounter()

"""Which implementation of an operation runs. A named one runs or raises; "auto" chooses and logs once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

from di_jax.errors import UserError

logger = logging.getLogger(__name__)

OPERATIONS = ("hyper_connections", "index_topk", "sparse_attention", "compress_store", "expert_ffn")


class UnknownImplementation(UserError):
    """The named implementation does not exist for this operation; the message lists those that do."""


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """`kernels.implementation` and its per-operation overrides (`kernels.ops`)."""

    default: str = "auto"
    overrides: tuple[tuple[str, str], ...] = ()

    def of(self, operation: str) -> str:
        return dict(self.overrides).get(operation, self.default)


def choose[F: Callable[..., object]](
    operation: str, implementation: str, available: Mapping[str, F], why: str | None = None
) -> F:
    """The implementation to call. `available` is ordered from the most to the least specialised.

    why: what keeps others from being available, which is logged.
    """
    if implementation == "auto":
        name = next(iter(available))
        _log_once(operation, name, why)
        return available[name]
    if implementation not in available:
        raise UnknownImplementation(
            f"kernels: operation {operation!r} has no implementation {implementation!r} here; "
            f"available: {', '.join(available)}"
        )
    return available[implementation]


_logged: set[tuple[str, str]] = set()


def _log_once(operation: str, name: str, why: str | None) -> None:
    if (operation, name) in _logged:
        return
    _logged.add((operation, name))  # before logging: steps compile in several threads
    logger.info("kernel %s: auto chose %s%s", operation, name, f", as {why}" if why else "")

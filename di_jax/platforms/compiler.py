"""With which options of XLA the engine's programs are compiled (`platform.compiler_options`)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from di_jax.config import PlatformGroup
from di_jax.errors import ConfigError
from di_jax.platforms.allocator import keeps_temporaries

logger = logging.getLogger(__name__)

Option = str | bool | int | float

# A decode step is some 1,500 to 4,400 small kernels, most of them inside loops: launched one by one they leave an H200
# waiting for the host 20% of a step of 12 ms, recorded as one graph they take 6 ms and it never waits
# (scripts/results/engine-nvidia-h200.json). XLA's own choice records no loops and no graphs of under five kernels.
# Collectives stay out: steps with them inside graphs have hung (jax-techniques, 1.12).
NVIDIA: Mapping[str, Option] = MappingProxyType(
    {
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
        ),
        "xla_gpu_graph_min_graph_size": 1,
    }
)
# Where the allocator keeps temporaries in their place, graphs are not written anew for them (`platform.allocator`).
WITH_VMM: Mapping[str, Option] = MappingProxyType({**NVIDIA, "xla_gpu_command_buffer_update_mode": "SKIP_TEMP"})


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles what was lowered. options: by their names in XLA's debug options, without dashes; none: XLA's own."""

    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, group: PlatformGroup, device: jax.Device) -> Compiler:
        """The compiler for `device`: what is known to be good there, and what the config lays over it.

        Raises ConfigError for an option that this XLA does not have, or a value that it does not take.
        """
        if group.compiler_options is None:
            return cls()
        nvidia = device.platform == "gpu" and "nvidia" in device.device_kind.lower()
        chosen = cls({} if not nvidia else WITH_VMM if keeps_temporaries(device) else NVIDIA)
        if chosen.options and (problem := chosen.problem()) is not None:
            logger.warning("steps are compiled without %s: %s", ", ".join(chosen.options), problem)
            chosen = cls()
        own = group.compiler_options
        if isinstance(own, str) or not own:
            return chosen
        for name, value in own.items():
            problem = cls({name: value}).problem()
            if problem is not None:
                raise ConfigError(f"platform.compiler_options.{name}: {value!r} is not taken by XLA here: {problem}")
        return cls({**chosen.options, **own})

    def __call__(self, lowered: Any) -> Any:
        """The executable of a `jax.stages.Lowered`."""
        return lowered.compile(compiler_options=dict(self.options) or None)

    def problem(self) -> str | None:
        """Why XLA does not take these options, in one line; None if it does. Compiles an empty program."""
        try:
            self(jax.jit(lambda: None).lower())
        except Exception as error:  # jax raises an XlaRuntimeError, a TypeError, ...: all about an option
            return str(error).partition("\n")[0]
        return None


XLA_DEFAULTS = Compiler()

"""One rank of a deployment on one device: the engine's own step programs over this rank's share of the weights.

The model is built for all ranks of the deployment, and its step is traced over a mesh of one device. There the axes of
the mesh have size 1, so a collective gives a rank back what it sent: it serves as many expert rows and table rows as it
asks for, spread over its slots as lots have it, which is what balanced ranks get from each other. Sorting, packing and
combining of what is exchanged run as in the deployment; only the wire is missing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from di_jax.commands.bench_slice.random_arrays import local_params, random_params
from di_jax.config import Config
from di_jax.engine.memory_sizing import blocks_per_sequence
from di_jax.engine.setup import build_parallel, cache_layout, draft_settings
from di_jax.errors import ConfigError
from di_jax.model.cache import CacheLayout
from di_jax.model.config import ModelConfig, check_decoder_replay
from di_jax.model.dspark import abstract_draft
from di_jax.model.linear import Numerics
from di_jax.model.transformer import abstract_model
from di_jax.parallel.mesh import DeviceMesh
from di_jax.platforms.compiler import Compiler
from kernels_pallas.choice import KernelChoice


class Rank:
    """The model, abstract: graphs and local parameters of target and draft, and the mesh of one device.

    config: of the deployment. Raises ConfigError and ModelConfigError for sizes that do not fit together.
    """

    def __init__(self, config: Config, model_config: ModelConfig, device: jax.Device) -> None:
        self.config, self.model_config = config, model_config
        self.context = config.engine.max_model_len
        if self.context > model_config.max_position_embeddings:
            raise ConfigError(
                f"engine.max_model_len: {self.context} exceeds the model's max_position_embeddings = "
                f"{model_config.max_position_embeddings}"
            )
        check_decoder_replay(model_config, config.engine.replay.keep_tokens)
        self.parallel = build_parallel(config, model_config)
        settings = draft_settings(config, model_config)
        assert settings is not None  # a slice without drafts is refused
        self.settings = settings
        self.numerics = Numerics.create(
            config.model.dtype,
            quantize_caches=config.model.quantize_caches,
            quantize_activations=config.model.quantize_activations,
            wo_a_input=config.model.wo_a_input,
        )
        kernels = KernelChoice(config.kernels.implementation, config.kernels.overrides)
        self.model = abstract_model(model_config, self.numerics, kernels, self.parallel)
        self.draft = abstract_draft(model_config, self.numerics, kernels, self.parallel)
        (target, weights), (drafter, drafts) = nnx.split(self.model), nnx.split(self.draft)
        self.graphs = target, drafter
        self.params = local_params(weights, self.parallel.mesh), local_params(drafts, self.parallel.mesh)
        self.plan = DeviceMesh()
        self.mesh = self.plan.build([device])
        self.sharding = NamedSharding(self.mesh, PartitionSpec())
        self.compiler = Compiler.of(config.platform, device)

    @property
    def local_slots(self) -> int:
        """Expert slots of a layer that this rank holds."""
        return self.model.layers.ffn.num_slots // self.parallel.mesh.ep

    @property
    def weights_bytes(self) -> int:
        return tree_bytes(self.params)

    def layout(self, requests: int) -> CacheLayout:
        """Caches of so many requests of the longest context."""
        blocks = requests * blocks_per_sequence(self.config.engine)
        return cache_layout(self.model_config, self.numerics.formats, blocks, requests, self.settings)

    def make_weights(self) -> tuple[Any, Any]:
        """Random ones on device, of target and draft."""
        slots = self.model.layers.ffn.num_slots
        both = [random_params(params, self.model_config, self.sharding, slots) for params in self.params]
        return both[0], both[1]

    def put(self, array: np.ndarray) -> jax.Array:
        """A plan or rows of the rank on device, with the leading axis of ranks."""
        return jax.device_put(array[None], self.sharding)


@dataclasses.dataclass
class Program:
    """One program of a step. trace: makes it, not called before `compile`. trace_s: of tracing; cold_s, warm_s: of
    lowering and compiling, without and with a compilation cache that has it. problem: why it could not be compiled: it
    does not fit the device."""

    name: str
    trace: Callable[[], Any]
    compiler: Compiler
    traced: Any = None
    executable: Any = None
    trace_s: float | None = None
    cold_s: float | None = None
    warm_s: float | None = None
    problem: str | None = None

    def compile(self, *, again: bool = True) -> None:
        """Traces and compiles; with `again` once more, now from the compilation cache."""
        try:
            self.traced, self.executable, self.trace_s, self.cold_s = self._compiled()
            if again:
                *_, self.warm_s = self._compiled()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.problem = " ".join(str(error).splitlines()[0].split())

    def _compiled(self) -> tuple[Any, Any, float, float]:
        """(traced, executable, seconds of tracing, seconds of lowering and compiling). Traced anew each time: jax keeps
        what it made of the same trace."""
        began = time.perf_counter()
        traced = self.trace()
        traced_at = time.perf_counter()
        executable = self.compiler(traced.lower())
        return traced, executable, traced_at - began, time.perf_counter() - traced_at

    def memory(self) -> dict[str, int]:
        """Bytes, as the compiler placed them. results: outputs beside those that take the place of an argument."""
        found = self.executable.memory_analysis()
        return {
            "arguments": found.argument_size_in_bytes,
            "results": found.output_size_in_bytes - found.alias_size_in_bytes,
            "temporaries": found.temp_size_in_bytes,
            "code": found.generated_code_size_in_bytes,
        }


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

"""Master weights of the demo model: how they start, how they travel between machines, how they become a checkpoint."""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax import Array, lax

from di_jax.checkpoint.loader import load_leaves
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.model.cache import CacheLayout, EngineState
from di_jax.model.config import LayerPlan, ModelConfig
from di_jax.model.dspark import LEAF_PREFIX
from di_jax.model.engram import EngramTable, HashTable, NgramHash
from di_jax.model.engram_tables import EngramTables
from di_jax.model.linear import Linear, Numerics
from di_jax.model.quantization import expand_rows, expand_weight, fake_quantize_weight
from di_jax.model.rows import Rows
from di_jax.model.transformer import Transformer
from kernels_pallas.choice import KernelChoice
from scripts.train_demo.attention import TrainingAttention, entries, select_entries

Params = dict[str, Array]
PART_BYTES = 15 * 2**20  # of one file that travels

# Kernels have no gradients.
TRAINING_KERNELS = KernelChoice(overrides=(("expert_ffn", "dense"), ("hyper_connections", "reference")))


class TrainingTransformer(Transformer):
    """The model over whole sequences, with dense attention for the indexer's warm-up or with sparse attention."""

    def __init__(self, config: ModelConfig, numerics: Numerics, dense: bool) -> None:
        super().__init__(config, numerics, TRAINING_KERNELS)
        self.dense = dense
        self.layers.attn = TrainingAttention(config, numerics, TRAINING_KERNELS, config.num_hidden_layers, dense)

    def select(
        self,
        plan: LayerPlan,
        x: Array,
        latent_query: Array,
        cos_sin: tuple[Array, Array],
        rows: Rows,
        state: EngineState,
        layout: CacheLayout,
        candidates: Any,
    ) -> tuple[Any, Any]:
        """Masks instead of lists; nothing is chosen if dense. The choice has no gradient."""
        if self.dense:
            return (), None
        assert self.indexers is not None
        batch = rows.start.shape[0]
        query = self.indexers.query(plan.index_source, latent_query, cos_sin)
        weights = self.indexers.head_weights(plan.index_source, x)
        keys = layout.formats.index.decode(entries(state.index, layout, plan.kv_source, batch))
        return select_entries(
            lax.stop_gradient(query).reshape(batch, -1, *query.shape[1:]),
            lax.stop_gradient(weights).reshape(batch, -1, weights.shape[-1]),
            lax.stop_gradient(keys).astype(query.dtype),
            self.config,
            candidates if plan.is_reindex else None,
            plan.is_candidate_source,
        )


class Build[Model: nnx.Module](Protocol):
    """A model around fp32 master weights by dotted path."""

    def __call__(self, params: Mapping[str, Array], exact: bool | Array = False) -> Model:
        """It computes with the values that the checkpoint's formats would hold of the masters, and gradients pass
        straight through; or, where the bool scalar `exact` says so, with the masters as they are."""


def storages(model: nnx.Module) -> dict[str, str]:
    """How a quantized checkpoint stores what `model` multiplies by or looks up, by dotted path: as
    `fake_quantize_weight` names it. Norms, gates, embedding and head are not here: training has these in fp32."""
    kinds = {
        path: module.storage if isinstance(module, Linear) else "rows"
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Linear | EngramTable)
    }
    return {".".join(map(str, (*path, "weight"))): kind for path, kind in kinds.items()}


def build_from[Model: nnx.Module](
    make: Callable[[ModelConfig], Model], config: ModelConfig, constants: nnx.State | None = None
) -> tuple[Build[Model], dict[str, tuple[int, ...]]]:
    """(the function from parameters to the model that `make` gives, shapes by path). constants: its other state.

    The model itself is that of an unquantized checkpoint, and takes weights of any float dtype: quantizing belongs to
    training, once for each stack.
    """
    stored = storages(nnx.eval_shape(lambda: make(config)))
    model = nnx.eval_shape(lambda: make(dataclasses.replace(config, quantization=None)))
    graph = nnx.graphdef(model)
    flat = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}

    def build(params: Mapping[str, Array], exact: bool | Array = False) -> Model:
        def seen(name: str) -> Array:
            master = params[name]
            if name not in stored:
                return master
            return jnp.where(exact, master, fake_quantize_weight(master, stored[name]))

        loaded = nnx.from_flat_state({path: leaf.replace(seen(name)) for name, (path, leaf) in flat.items()})
        return nnx.merge(graph, nnx.merge_state(loaded, constants or nnx.State({})))

    return build, {name: leaf.get_value().shape for name, (_, leaf) in flat.items()}


def builder(
    config: ModelConfig, numerics: Numerics, tables: EngramTables, *, dense: bool = False
) -> tuple[Build[TrainingTransformer], dict[str, tuple[int, ...]]]:
    """`build_from` for the backbone."""
    hashes: nnx.State = nnx.State({"ngram_hash": nnx.state(NgramHash(config, tables), HashTable)})
    return build_from(lambda config: TrainingTransformer(config, numerics, dense), config, hashes)


def initial(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], seed: int) -> Params:
    """fp32 parameters; every leaf's randomness comes from the seed and its path."""
    return {path: jnp.asarray(_leaf(config, path, shape, seed)) for path, shape in shapes.items()}


def _leaf(config: ModelConfig, path: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
    hc = config.hc_mult
    name = path.removesuffix(".weight").rsplit(".", 1)[-1]

    def normal(std: float) -> np.ndarray:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    if "hc_" in path:
        if name == "fn":
            return normal(0.02)
        if name == "scale":
            return np.full(shape, 0.5, np.float32)
        # Streams start nearly separate, read in turn and all written: the layer's part of a plain residual stream.
        base = np.zeros(shape, np.float32)
        for layer in range(shape[0]):
            base[layer, :hc] = np.where(np.arange(hc) == layer % hc, 1.0, -1.5)
            base[layer, 2 * hc :] = 4.0 * np.eye(hc, dtype=np.float32).reshape(-1)
        return base
    if name.endswith("norm") or name in ("q_weight", "k_weight"):
        return np.ones(shape, np.float32)
    if name in ("attn_sink", "bias", "bias_vl"):
        return np.zeros(shape, np.float32)
    if path == "layers.ffn.gate.weight":  # small: the bias can balance experts whose inputs still look alike
        return normal(0.2 * config.hidden_size**-0.5)
    if path.startswith("engram_tables") or path == "embed.weight":
        return normal(0.5)
    if path == "head.weight":
        return normal(config.hidden_size**-0.5)
    residual = (2 * config.num_hidden_layers) ** -0.5 if name in ("wo_b", "w2") else 1.0
    return normal(residual * shape[-1] ** -0.5)


def save_parts(folder: Path, params: Mapping[str, Array], prefix: str) -> list[Path]:
    """Weights only, in files of at most 15 MiB: e4m3 with a scale per 32 channels for experts and tables, else bf16.

    Deflated, which takes a sixth off trained weights: the model's 31 MiB and the draft's 4 travel as 29.
    """
    arrays: dict[str, np.ndarray] = {}
    for path, value in params.items():
        host = np.asarray(jax.device_get(value), np.float32)
        if ".experts." in path or path.startswith("engram_tables"):
            groups = host.reshape(-1, 32)
            scale = np.maximum(np.abs(groups).max(axis=1, keepdims=True), 1e-12) / 448
            arrays[f"{path}|e4m3|{','.join(map(str, host.shape))}"] = np.concatenate(
                [
                    (groups / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
                    scale.astype(np.float32).view(np.uint8).reshape(-1, 4),
                ],
                axis=1,
            )
        else:
            arrays[f"{path}|bf16|{','.join(map(str, host.shape))}"] = host.astype(ml_dtypes.bfloat16).view(np.uint16)
    parts: list[dict[str, np.ndarray]] = [{}]
    for key, array in arrays.items():
        rows = max(1, PART_BYTES // max(1, array[:1].nbytes)) if array.ndim else 1
        pieces = [array] if array.nbytes <= PART_BYTES else np.array_split(array, -(-len(array) // rows))
        for i, piece in enumerate(pieces):
            if sum(a.nbytes for a in parts[-1].values()) + piece.nbytes > PART_BYTES:
                parts.append({})
            parts[-1][f"{key}|{i}"] = piece
    files = []
    for i, part in enumerate(parts):
        files.append(folder / f"{prefix}-{i}.npz")
        np.savez_compressed(files[-1], **part)  # type: ignore[arg-type]
    return files


def load_parts(files: list[Path]) -> dict[str, np.ndarray]:
    """fp32 parameters of `save_parts`. Raises ValueError that names the file if one is damaged or none of these."""
    pieces: dict[str, dict[int, np.ndarray]] = {}
    for file in files:
        try:
            with np.load(file) as data:
                for key in data.files:
                    stem, i = key.rsplit("|", 1)
                    pieces.setdefault(stem, {})[int(i)] = data[key]
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError) as error:
            # These name no file, and speak of pickles where the first bytes are not a zip's.
            raise ValueError(f"{file} is damaged, or not a file of a training's weights") from error
    params = {}
    for stem, found in pieces.items():
        path, kind, shape_text = stem.split("|")
        shape = tuple(int(n) for n in shape_text.split(",") if n)
        array = np.concatenate([found[i] for i in sorted(found)]) if len(found) > 1 else found[0]
        if kind == "e4m3":
            values = array[:, :32].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            params[path] = (values * array[:, 32:].copy().view(np.float32)).reshape(shape)
        else:
            params[path] = array.view(ml_dtypes.bfloat16).astype(np.float32).reshape(shape)
    return params


def from_checkpoint(folder: Path, config: ModelConfig, *, draft: bool = False) -> dict[str, np.ndarray]:
    """fp32 parameters that an exported checkpoint holds: the backbone's, or with `draft` the draft's."""
    with open_checkpoint(folder, config) as reader:
        leaves = load_leaves(reader, config, None, draft=draft)
    params = {}
    for path, leaf in leaves.items():
        if path.endswith(".scale") and path.removesuffix(".scale") + ".weight" in leaves:
            continue
        if path.startswith(LEAF_PREFIX) is not draft:
            continue
        scale = leaves.get(path.removesuffix(".weight") + ".scale")
        expand = expand_rows if path.startswith("engram_tables") else expand_weight
        params[path] = np.asarray(expand(leaf, scale, jnp.dtype(jnp.float32)))
    return params

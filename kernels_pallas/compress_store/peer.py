"""The cache writes of `reference` in PyTorch's operations, stored in place by index: what the bench's peers compute.

Caches are flat, [records + 1, ...]: the last record takes what is not stored, as PyTorch has no store that drops rows,
and a choice of rows by a mask would have a length that the host has to wait for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Tensor = Any  # of PyTorch, whose package comes as an argument
E4M3_MAX, E2M1_MAX = 448.0, 6.0
MIDPOINTS = ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))  # see `e2m1_code`


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a layer's shapes are made of. source: its KV source, None of a window layer; ordinal: among pooled ones."""

    source: int | None
    ratio: int
    ordinal: int
    decode: bool
    tile: int
    slots: int
    window_ring: int
    pair_ring: int
    first: int  # record of a block that is the source's first
    per_block: int
    rows_per_block: int
    eps: float


@dataclasses.dataclass(frozen=True)
class Rows:
    """The arrays of `di_jax.model.rows.Rows` that stores need, int64 or bool: [T], then [S]."""

    valid: Tensor
    position: Tensor
    sequence: Tensor
    start: Tensor
    end: Tensor
    first_row: Tensor
    slot: Tensor
    cached: Tensor
    window_start: Tensor
    block_table: Tensor  # [S, blocks]


def store_layer(torch: Any, sizes: Sizes, caches: dict[str, Tensor], a: dict[str, Tensor], rows: Rows) -> Tensor:
    """All cache writes of a layer with a source; its normed latents [N, 512].

    caches: uint8 compressed, index and window, fp32 pairs [records, 2, 512], which a source of ratio 1 leaves alone.
    a: projected and latent [T, 512], gate [T, 512] where the ratio is above 1, key [N, 128], the weights kv_norm, norm
    and key_norm, and the frequencies of the rotation.
    """
    latent = a["latent"]
    row, entry, emits = _entries(torch, sizes, rows)
    if sizes.ratio > 1:
        pair = torch.stack([a["gate"], latent], 1)
        latent = _pooled(torch, sizes, caches["pairs"], pair, row, rows).to(a["projected"].dtype)
        kept = rows.valid & (rows.position >= rows.end[rows.sequence] - sizes.pair_ring)
        slot = sizes.ordinal * sizes.slots + rows.slot[rows.sequence]
        _put(torch, caches["pairs"], slot * sizes.pair_ring + rows.position % sizes.pair_ring, kept, pair)
    latent = rms_norm(torch, latent, a["norm"], sizes.eps)
    cos_sin = rotation(torch, a["frequencies"], entry * sizes.ratio)
    table = rows.block_table[rows.sequence[row]]
    block = table.gather(1, (entry // sizes.per_block)[:, None])[:, 0]
    place = block * sizes.rows_per_block + sizes.first + entry % sizes.per_block
    stored = emits & (entry * sizes.ratio >= rows.cached[rows.sequence[row]])
    _put(torch, caches["compressed"], place, stored, fp4_micro(torch, rotate(torch, latent, cos_sin)))
    key = rms_norm(torch, a["key"], a["key_norm"], sizes.eps)
    _put(torch, caches["index"], place, stored, fp4_block(torch, rotate(torch, key, cos_sin)))
    store_window(torch, sizes, caches, a, rows, *window_places(torch, sizes, a, rows))
    return latent


def window_places(torch: Any, sizes: Sizes, a: dict[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor, Any]:
    """(record of each row in the rings of a layer, whether it is stored, cos and sin), the same in all layers."""
    first = torch.maximum(rows.end - sizes.window_ring, rows.window_start)
    kept = rows.valid & (rows.position >= first[rows.sequence])
    place = rows.slot[rows.sequence] * sizes.window_ring + rows.position % sizes.window_ring
    return place, kept, rotation(torch, a["frequencies"], rows.position)


def store_window(
    torch: Any, sizes: Sizes, caches: dict[str, Tensor], a: dict[str, Tensor], rows: Rows, place: Tensor, kept: Tensor,
    cos_sin: Any,
) -> None:  # fmt: skip
    """Window rows; in prefill they come normed and rotated, as attention has used them before."""
    kv = a["projected"]
    if sizes.decode:
        kv = rotate(torch, rms_norm(torch, kv, a["kv_norm"], sizes.eps), cos_sin)
    _put(torch, caches["window"], place, kept, fp8_block(torch, kv))


def _put(torch: Any, cache: Tensor, place: Tensor, stored: Tensor, record: Tensor) -> None:
    cache[torch.where(stored, place, len(cache) - 1)] = record


def _entries(torch: Any, sizes: Sizes, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Groups that this step may complete: (last row, entry, whether it emits), each [N]."""
    ratio, tile, total = sizes.ratio, sizes.tile, len(rows.position)
    device = rows.position.device
    if ratio == 1:
        return torch.arange(total, device=device), rows.position, rows.valid
    first = rows.position.reshape(-1, tile)[:, 0]
    step = ratio * torch.arange(-(-tile // ratio), device=device)
    offset = (ratio - 1 - first % ratio)[:, None] + step
    row = (torch.arange(total // tile, device=device)[:, None] * tile + offset).reshape(-1).clamp(max=total - 1)
    return row, rows.position[row] // ratio, (offset < tile).reshape(-1) & rows.valid[row]


def _pooled(torch: Any, sizes: Sizes, pairs: Tensor, pair: Tensor, row: Tensor, rows: Rows) -> Tensor:
    """Softmax pooling, channel by channel, of the groups that end with each row [N]: fp32 [N, 512]."""
    sequence = rows.sequence[row]
    member = rows.position[row][:, None] - (sizes.ratio - 1) + torch.arange(sizes.ratio, device=row.device)
    slot = sizes.ordinal * sizes.slots + rows.slot[sequence][:, None]
    history = pairs[(slot * sizes.pair_ring + member % sizes.pair_ring)]
    start = rows.start[sequence][:, None]
    fresh = pair[(rows.first_row[sequence][:, None] + member - start).clamp(0, len(pair) - 1)]
    group = torch.where((member >= start)[..., None, None], fresh, history)
    return (torch.softmax(group[:, :, 0], 1) * group[:, :, 1]).sum(1)


# ---- norm, rotation and the records of `di_jax.model.quantization` ----


def rms_norm(torch: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (weight.float() * wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(weight.dtype)


def rotation(torch: Any, frequencies: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    angle = position.float()[:, None] * frequencies
    return torch.cos(angle), torch.sin(angle)


def rotate(torch: Any, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = cos_sin
    channels = 2 * cos.shape[-1]
    tail = x[..., -channels:].float().unflatten(-1, (-1, 2))
    a, b = tail[..., 0], tail[..., 1]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-channels], turned.to(x.dtype)], -1)


def fp8_block(torch: Any, x: Tensor) -> Tensor:
    """[T, d] -> uint8 [T, d + d / 32]: e4m3 values, and a power of two for 32 of them."""
    group = x.float().unflatten(-1, (-1, 32))
    exponent = _pow2_ceil(torch, group.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / E4M3_MAX))
    value = (group * _exp2(torch, -exponent)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([value.flatten(-2), (exponent[..., 0] + 127).to(torch.uint8)], -1)


def fp4_block(torch: Any, x: Tensor) -> Tensor:
    """[N, d] -> uint8 [N, d / 2 + d / 32]: e2m1 codes, and a power of two for 32 of them."""
    group = x.float().unflatten(-1, (-1, 32))
    amax = group.abs().amax(-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126)
    exponent = _pow2_ceil(torch, amax * (1 / E2M1_MAX))
    code = e2m1_code(torch, group * _exp2(torch, -exponent))
    return torch.cat([_packed(torch, code.flatten(-2)), (exponent[..., 0] + 127).to(torch.uint8)], -1)


def fp4_micro(torch: Any, x: Tensor) -> Tensor:
    """[N, d] -> uint8 [N, d / 2 + d / 16]: e2m1 codes, and an e4m3 scale for 16 of them."""
    group = x.float().unflatten(-1, (-1, 16))
    scale = group.abs().amax(-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX
    scale = scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    code = e2m1_code(torch, group / scale.float())
    return torch.cat([_packed(torch, code.flatten(-2)), scale[..., 0].view(torch.uint8)], -1)


def e2m1_code(torch: Any, x: Tensor) -> Tensor:
    """fp32 -> int32 codes 0..15, ties to the even one."""
    size = x.abs()
    code = (size > 0.25).int()
    for midpoint, inclusive in MIDPOINTS:
        code = code + ((size >= midpoint) if inclusive else (size > midpoint)).int()
    return code | ((x.view(torch.int32) >> 28) & 8)


def _packed(torch: Any, code: Tensor) -> Tensor:
    pairs = code.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)


def _pow2_ceil(torch: Any, x: Tensor) -> Tensor:
    """int32 exponent of the least power of two that is not below x > 0."""
    bits = x.view(torch.int32)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).int()


def _exp2(torch: Any, exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)

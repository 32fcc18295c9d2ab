"""Peak rates and memory of the devices that `plan` reckons with: published figures, none of them measured here.

A plan divides by these, so its times are floors. Rates are of dense products (vendors print twice as much for 2:4
sparsity), links are one direction of what is printed for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

GiB = 2**30


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One device as jax counts them.

    domain: devices that reach each other over `link_bytes_per_s`; beyond it `network_bytes_per_s` is what one of them
    has. Both are bytes sent per second.
    """

    name: str
    hbm_bytes: int
    bytes_per_s: float
    flops_per_s: float  # 16-bit operands
    quantized_flops_per_s: float  # 8-bit floating-point operands
    domain: int
    link_bytes_per_s: float
    network_bytes_per_s: float


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        device.name: device
        for device in (
            # NVIDIA H200 SXM data sheet: 141 GB, 4.8 TB/s, BF16 1,979 and FP8 3,958 TFLOP/s with sparsity, NVLink
            # 900 GB/s both ways; HGX board of 8. DGX H200 data sheet: one 400 Gb/s adapter for each. The driver shows
            # more than 141 GB; large bf16 products reach 760 TFLOP/s and fp8 ones 1,469 (jax on one H200).
            Accelerator("h200", 141 * 10**9, 4.8e12, 989.5e12, 1979e12, 8, 450e9, 50e9),
            # NVIDIA DGX B200 data sheet, its 8 devices together: 1,440 GB, 64 TB/s, FP8 72 PFLOP/s with sparsity,
            # NVLink 14.4 TB/s both ways, one 400 Gb/s adapter for each; BF16 is half of FP8.
            Accelerator("b200", 180 * 10**9, 8e12, 2250e12, 4500e12, 8, 900e9, 50e9),
            # Uncertain: announced figures (Huawei Connect, September 2025) of the Ascend 950DT, the variant for decode:
            # 144 GB, 4 TB/s, FP8 1 PFLOP/s, interconnect 2 TB/s, read as both ways; SuperPoD of 8,192. The 950PR has
            # 128 GB and 1.6 TB/s. Half the FP8 rate for 16 bits and 400 Gb/s beyond the pod are assumptions.
            Accelerator("ascend950", 144 * 10**9, 4e12, 500e12, 1000e12, 8192, 1000e9, 50e9),
            # Google Cloud TPU7x (Ironwood) documentation, of a chip: 192 GiB, 7,380 GB/s, BF16 2,307 and FP8 4,614
            # TFLOP/s, ICI 1,200 GB/s both ways, pod of 9,216 chips, data-center network 100 Gb/s. A chip is two
            # chiplets and jax shows each as a device: half of everything, and twice as many in a pod.
            Accelerator("tpu-v7x", 96 * GiB, 3.69e12, 1153.5e12, 2307e12, 18432, 300e9, 6.25e9),
            # Nominal, a server socket with 96 AVX-512 cores at 2.4 GHz (32 fp32 operations a cycle) and 12 channels of
            # DDR5-4800 with 32 GB each; 16 and 8 bits are no faster. 100 Gb/s between sockets. For comparison only.
            Accelerator("cpu", 384 * 10**9, 460.8e9, 7.4e12, 7.4e12, 1, 12.5e9, 12.5e9),
        )
    }
)

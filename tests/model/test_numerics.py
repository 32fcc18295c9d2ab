"""The precision contract: what `model.dtype`, `quantize_activations` and `wo_a_input` mean together."""

from __future__ import annotations

import pytest

from di_jax.model.linear import Numerics


@pytest.mark.parametrize(
    ("dtype", "activations", "wo_a_input", "expected"),
    [
        ("bfloat16", "auto", None, (True, True)),
        ("float32", "auto", None, (False, False)),
        ("float32", True, None, (True, True)),
        ("bfloat16", False, None, (False, False)),
        ("bfloat16", "auto", "bf16", (True, False)),
        ("float32", "auto", "quantized", (False, True)),
    ],
)
def test_activation_quantizers_follow_the_dtype(
    dtype: str, activations: bool | str, wo_a_input: str | None, expected: tuple[bool, bool]
) -> None:
    numerics = Numerics.create(dtype, quantize_activations=activations, wo_a_input=wo_a_input)
    assert (numerics.quantize_activations, numerics.quantize_wo_a_input) == expected

"""Options of XLA: those of the device, what a config lays over them, and what XLA does not take."""

import dataclasses
from typing import Any

import jax
import pytest

from di_jax.config import Config, PlatformGroup
from di_jax.errors import ConfigError
from di_jax.platforms import allocator
from di_jax.platforms.compiler import NVIDIA, XLA_DEFAULTS, Compiler


@dataclasses.dataclass
class Device:
    platform: str
    device_kind: str
    stats: dict[str, int] | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


H200, CPU, TPU = Device("gpu", "NVIDIA H200"), Device("cpu", "cpu"), Device("tpu", "TPU7x")


def chosen(options: Any, device: Any = H200) -> dict[str, Any]:
    return dict(Compiler.of(PlatformGroup(compiler_options=options), device).options)


def test_graphs_hold_loops_on_nvidia_alone() -> None:
    assert chosen("auto") == dict(NVIDIA)
    assert "WHILE" in chosen("auto")["xla_gpu_enable_command_buffer"]
    assert "COLLECTIVES" not in chosen("auto")["xla_gpu_enable_command_buffer"]
    assert chosen("auto", CPU) == chosen("auto", TPU) == {}


def test_temporaries_that_stay_are_not_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "client_options", lambda: {"allocator": "vmm"})
    assert chosen("auto") == {**NVIDIA, "xla_gpu_command_buffer_update_mode": "SKIP_TEMP"}
    assert chosen("auto", CPU) == {} == chosen(None)
    bfc = dataclasses.replace(H200, stats={"bytes_limit": 1})
    assert chosen("auto", bfc) == dict(NVIDIA), "a client that was there before has temporaries that move"


def test_null_leaves_xla_its_own() -> None:
    assert chosen(None) == {} == dict(XLA_DEFAULTS.options)


def test_a_mapping_is_laid_over_what_the_device_has() -> None:
    own = {"xla_gpu_graph_min_graph_size": 7, "xla_gpu_enable_triton_gemm": False}
    assert chosen(own) == {**NVIDIA, **own}
    assert chosen({}) == dict(NVIDIA)


@pytest.mark.parametrize(
    ("options", "key", "reason"),
    [
        ({"xla_no_such_thing": 1}, "platform.compiler_options.xla_no_such_thing", "No such compile option"),
        ({"xla_gpu_graph_min_graph_size": "many"}, "platform.compiler_options.xla_gpu_graph_min_graph_size", "int32"),
        ({"xla_gpu_enable_command_buffer": "FOO"}, "platform.compiler_options.xla_gpu_enable_command_buffer", "enum"),
        ({"xla_gpu_enable_triton_gemm": [1]}, "platform.compiler_options.xla_gpu_enable_triton_gemm", "list"),
    ],
)
def test_what_xla_does_not_take_is_named(options: Any, key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        chosen(options)
    assert str(error.value).startswith(key)


@pytest.mark.parametrize("value", ["none", "fast", 3, ["xla_gpu_enable_triton_gemm"]])
def test_neither_a_mapping_nor_auto(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"platform\.compiler_options"):
        PlatformGroup(compiler_options=value)


def test_options_reach_xla() -> None:
    """A program compiled with options runs, and one with an unknown option is refused when it is compiled."""
    lowered = jax.jit(lambda x: (x + 1) * 2 + 3).lower(jax.ShapeDtypeStruct((4,), "float32"))
    raw = Compiler({"xla_backend_optimization_level": 0, "xla_dump_disable_metadata": True})
    with pytest.raises(Exception, match="No such compile option"):
        Compiler({"xla_no_such_thing": True})(lowered)
    assert raw(lowered)(jax.numpy.ones(4)).tolist() == [7.0] * 4


def test_the_config_carries_them() -> None:
    config = Config.from_dict({"platform": {"compiler_options": {"xla_gpu_enable_triton_gemm": False}}})
    assert config.platform.compiler_options == {"xla_gpu_enable_triton_gemm": False}
    assert Config().platform.compiler_options == "auto"

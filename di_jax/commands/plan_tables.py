"""The report of `plan` for a person to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from di_jax.commands.plan import PlanReport, StepReport

NOTES = """\
Bytes and flops are of one device, in decimal units. Weights and caches: from their shapes. Temporaries: {source}.
Peak: weights, caches of engine.max_num_seqs requests at engine.max_model_len, and temporaries. Collectives: bytes that
a device sends in a call; a loop whose rounds depend on the routing counts one round. Flops: of the weights that the
rows pass through, and of attention. Times are floors from data-sheet rates, without latency: of a decode step with all
requests at engine.max_model_len, and of a prefill step with the first rows of one prompt."""
SOURCES = {
    "estimated": "estimated from the traced program; what a compiler copies for its layouts comes on top",
    "device_compile": "as that device's compiler placed them",
}


def tables(report: PlanReport, heading: list[str]) -> str:
    """The whole report as plain text of a few tables."""
    steps = {"prefill": report.prefill, "decode": report.decode}
    return "\n".join(
        [
            *heading,
            "",
            *_memory(steps),
            "",
            *_times(steps),
            "",
            *_collectives(steps),
            "",
            *_layout(report.layout),
            "",
            *_storage(report),
            "",
            NOTES.format(source=SOURCES[report.decode.temp_source]),
        ]
    )


def _memory(steps: dict[str, StepReport]) -> list[str]:
    rows = [
        ("weights", lambda s: _size(s.weights_bytes)),
        ("temporaries", lambda s: _size(s.temp_bytes)),
        ("peak", lambda s: _size(s.peak_bytes_per_device)),
        ("device memory", lambda s: _size(s.hbm_bytes)),
        ("fits", lambda s: "yes" if s.fits else "NO"),
        ("requests at full length, all devices", lambda s: f"{s.max_concurrent_at_max_len:,}"),
        ("paged caches of a token", lambda s: f"{s.kv_bytes_per_token:g} B"),
        ("state of a request", lambda s: _size(s.state_bytes_per_sequence)),
        ("compile", lambda s: f"{s.compile_s:.1f} s"),
    ]
    return [_row("memory of a device", steps)] + [_row(name, {k: f(s) for k, s in steps.items()}) for name, f in rows]


def _times(steps: dict[str, StepReport]) -> list[str]:
    rows = [
        ("flops", lambda s: f"{s.flops_per_step:.3g}"),
        ("compute", lambda s: f"{s.roofline.compute_s * 1e3:.3f} ms"),
        ("memory", lambda s: f"{s.roofline.memory_s * 1e3:.3f} ms"),
        ("network", lambda s: f"{s.roofline.network_s * 1e3:.3f} ms"),
        ("bound by", lambda s: s.roofline.bound),
    ]
    return [_row("least time of a step", steps)] + [_row(name, {k: f(s) for k, s in steps.items()}) for name, f in rows]


def _row(name: str, cells: dict[str, Any]) -> str:
    words = [cell if isinstance(cell, str) else column for column, cell in cells.items()]
    return f"{name:38}" + "".join(f"{word:>16}" for word in words)


def _collectives(steps: dict[str, StepReport]) -> list[str]:
    lines = [
        f"{'collectives':11} {'operation':14} {'axes':14} {'sent in a call':>16} {'a step':>7} {'sent in a step':>16}"
    ]
    for name, step in steps.items():
        for call in step.collectives:
            lines.append(
                f"{name:11} {call.op:14} {','.join(call.axes):14} {_size(call.bytes):>16} {call.per_step:7d} "
                f"{_size(call.bytes * call.per_step):>16}"
            )
        if not step.collectives:
            lines.append(f"{name:11} none")
    return lines


def _layout(layout: list[dict[str, Any]]) -> list[str]:
    width = max(len(array["name"]) for array in layout)
    lines = [f"{'array':{width}} {'on a device':>12}  {'dtype':14} shape and partition spec"]
    for array in sorted(layout, key=lambda a: -a["bytes_per_device"]):
        lines.append(
            f"{array['name']:{width}} {_size(array['bytes_per_device']):>12}  {array['dtype']:14} "
            f"{array['shape']} {array['spec']}"
        )
    return lines


def _storage(report: PlanReport) -> list[str]:
    storage = report.storage
    return [
        f"storage: window state {_size(storage.window_bytes_per_sequence)} a sequence, "
        f"{_size(storage.window_bytes_per_million)} a million; prefix store "
        f"{_size(storage.kv_store_bytes_per_gpu)} a device, {storage.servers} servers (plan.storage)"
    ]


def _size(nbytes: float) -> str:
    """Bytes in decimal units, as memory is sold and links are rated."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes:g} B"

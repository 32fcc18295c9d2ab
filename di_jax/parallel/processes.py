"""One run in several processes: who they are, how they start, and what each has of the mesh and of the requests.

`jax.distributed` joins the devices; an `Agreement` joins the hosts. Both are of the process, as the devices are, so
there is one, `current()`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from di_jax.errors import ConfigError
from di_jax.parallel.agreement import GRACE_S, SILENCE_S, Agreement, ProcessError, ProcessGroup, end_process

if TYPE_CHECKING:
    import jax

    from di_jax.config import Config
    from di_jax.parallel.mesh import DeviceMesh

logger = logging.getLogger(__name__)

# jax ends every process, with a stack trace that seldom names the cause, this long after one fell silent: later than
# the agreement, which says which one it was.
JAX_HEARTBEAT_S = int(SILENCE_S + 2 * GRACE_S)
JAX_SHUTDOWN_S = 10
CARD_BYTES = 4096  # of what processes tell one another before they can talk

_current: Agreement = Agreement()
_exit_code = 1  # of a process that does not come to its end with the others


@dataclasses.dataclass(frozen=True)
class Launcher:
    """The variables by which a launcher tells a process who it is. needs: those that must be there besides. finds: jax
    finds the first process by itself; `extra`, only where that package is installed."""

    name: str
    count: str | None
    index: str
    local_index: str | None = None
    needs: tuple[str, ...] = ()
    finds: bool = True
    extra: str | None = None


# In the order in which they are looked for: mpirun may start its own daemons by srun, and srun sets PMI's names too.
LAUNCHERS = (
    Launcher("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("SLURM", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST")),
    Launcher("MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", finds=False),
    Launcher("Kubernetes", None, "JOB_COMPLETION_INDEX", None, ("KUBERNETES_SERVICE_HOST",), extra="kubernetes"),
)


@dataclasses.dataclass(frozen=True)
class Start:
    """What `jax.distributed.initialize` is told; None is left to jax. local_index: among the processes of a machine."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    local_index: int | None = None


def find_start(config: Config, environment: Mapping[str, str]) -> Start | None:
    """How this process joins the others: from `distributed.*`, and where that is null from the launcher's environment.
    None when it is alone, as `plan` always is. Raises ConfigError for half of what is needed."""
    group = config.distributed
    if group.num_processes == 1 or config.command == "plan":
        return None
    launcher = next((one for one in LAUNCHERS if _speaks(one, environment)), None)
    count, index, local_index, name = group.num_processes, group.process_id, None, "no launcher says it"
    if launcher is not None:
        name = f"{launcher.name} does not say it"
        count = _number(launcher.count, environment) if count is None else count
        index = _number(launcher.index, environment) if index is None else index
        local_index = _number(launcher.local_index, environment)
    asked = group.coordinator is not None or group.num_processes is not None or group.process_id is not None
    jax_finds = launcher is not None and launcher.finds and not (launcher.extra and not _installed(launcher.extra))
    if not asked and (launcher is None or count == 1 or (launcher.extra and not jax_finds)):
        return None
    values = {"coordinator": group.coordinator, "num_processes": count, "process_id": index}
    for key, value in values.items():
        if value is None and not (jax_finds and key != "process_id"):
            raise ConfigError(
                f"distributed.{key}: is not set, and {name}; give distributed.coordinator (HOST:PORT "
                "of process 0), distributed.num_processes and distributed.process_id, or distributed.num_processes: 1"
            )
    if count is not None and index is not None and not 0 <= index < count:
        raise ConfigError(
            f"distributed.process_id: {index} is not one of distributed.num_processes = {count}, counted from 0"
        )
    return Start(group.coordinator, count, index, local_index)


def start(config: Config) -> Agreement:
    """Joins the processes of the run, at most once; call before a device is touched. Collective.

    Raises ConfigError for settings that do not fit, ProcessError for processes that cannot be reached.
    """
    global _current
    found = None if _current.num_processes > 1 else find_start(config, os.environ)
    if found is None:
        return _current
    import jax
    from jax.experimental import multihost_utils

    # The service would take SIGTERM, which is to end a process.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    detected = None in (found.coordinator, found.num_processes, found.process_id)
    logger.info("joining the other processes%s", "" if found.coordinator is None else f" at {found.coordinator}")
    _keep_stdout_for_results()
    try:
        jax.distributed.initialize(
            found.coordinator,
            found.num_processes,
            found.process_id,
            _local_devices(config, found),
            cluster_detection_method=None if detected else "deactivate",
            heartbeat_timeout_seconds=JAX_HEARTBEAT_S,
            shutdown_timeout_seconds=JAX_SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"distributed: the processes do not come together: {error}") from error

    def share(card: bytes) -> list[bytes]:
        padded = np.zeros(CARD_BYTES, np.uint8)
        padded[: len(card)] = np.frombuffer(card, np.uint8)
        return [row.tobytes().rstrip(b"\0") for row in multihost_utils.process_allgather(padded)]

    index, count = jax.process_index(), jax.process_count()
    _name_logs(index)
    hosts = () if found.coordinator is None else (found.coordinator.rpartition(":")[0].strip("[]"),)
    _current = ProcessGroup.meet(index, count, share, hosts=hosts, timeout_s=config.distributed.timeout_s)
    atexit.register(_leave_at_exit)
    check_same_config(_current, config)
    logger.info("process %d of %d, with %d of %d devices", index, count, jax.local_device_count(), jax.device_count())
    return _current


def current() -> Agreement:
    """The agreement of this process: with itself alone until `start`."""
    return _current


def check_same_config(agreement: Agreement, config: Config) -> None:
    """Raises ConfigError, in every process, when they were started with different configs. Collective."""
    shared = {name: group for name, group in _flat(config.to_dict()).items() if name != "distributed.process_id"}
    everyone = [json.loads(payload) for payload in agreement.exchange(json.dumps(shared).encode(), "the config")]
    for index, other in enumerate(everyone):
        differing = sorted(name for name in shared if other.get(name) != everyone[0].get(name))
        if differing:
            values = f"{everyone[0].get(differing[0])!r} and {other.get(differing[0])!r}"
            raise ConfigError(
                f"{', '.join(differing)}: processes 0 and {index} were started with different values ({values}); "
                "start all with the same config"
            )


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Tells the other processes of an error inside, and else waits until all of them are through."""
    global _exit_code
    try:
        yield
        _current.leave()
    except BaseException as error:
        _current.fail(error)
        _exit_code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        if isinstance(error, Exception) and _current.lost is not None:
            _exit_code = ProcessError.exit_code
            raise ProcessError(_current.lost) from error
        raise


def check_owners(owners: Sequence[int], cp: int, processes: int) -> None:
    """Raises ConfigError unless every process can schedule its part of a mesh.

    owners: the process of every rank, in the order of ranks; cp: neighbouring ranks that share the prompts of one
    data-parallel rank. Their blocks are given out by one ledger, so one process must have them all.
    """
    counts = [sum(owner == process for owner in owners) for process in range(processes)]
    sizes = f"mesh.dp x mesh.cp: {len(owners) // cp} x {cp} = {len(owners)} ranks over {processes} processes"
    if 0 in counts:
        raise ConfigError(f"{sizes}: process {counts.index(0)} has none; raise mesh.dp or start fewer processes")
    if len(set(counts)) > 1:
        raise ConfigError(f"{sizes}: they have {', '.join(map(str, counts))}; give each as many devices")
    for first in range(0, len(owners), cp):
        if len(set(owners[first : first + cp])) > 1:
            raise ConfigError(
                f"{sizes}: the {cp} context-parallel ranks of data-parallel rank {first // cp} lie in processes "
                f"{', '.join(map(str, sorted(set(owners[first : first + cp]))))}, but one process schedules them; let "
                f"mesh.cp divide the {counts[0]} devices of a process"
            )


def data_rank_owners(mesh: jax.sharding.Mesh, plan: DeviceMesh) -> list[int]:
    """The process that schedules each data-parallel rank. Raises ConfigError as `check_owners`."""
    from jax.sharding import NamedSharding, PartitionSpec

    ranks = NamedSharding(mesh, PartitionSpec(plan.rank_axes)).devices_indices_map((plan.world,))
    devices: dict[jax.Device, tuple[slice, ...]] = dict(ranks)
    owner_of = {index[0].indices(plan.world)[0]: device.process_index for device, index in devices.items()}
    owners = [owner_of[rank] for rank in range(plan.world)]
    check_owners(owners, plan.cp, current().num_processes)
    return owners[:: plan.cp]


def _leave_at_exit() -> None:
    """At the end of an interpreter that nothing else led to its end (`run.main` does)."""
    if _current.work is not None:
        _current.fail(ProcessError(f"it ended during {_current.work}"))
    with contextlib.suppress(ProcessError):
        _current.leave()
        return
    end_process(_exit_code)  # jax would wait for the others


def _speaks(launcher: Launcher, environment: Mapping[str, str]) -> bool:
    names = [name for name in (launcher.count, launcher.index, *launcher.needs) if name]
    return all(environment.get(name) for name in names)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _number(name: str | None, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name or "")
    try:
        return int(text) if text else None
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is not a number; give distributed.* instead") from None


def _local_devices(config: Config, found: Start) -> list[int] | None:
    """The accelerators of a machine that this of its processes uses: as many as a process has ranks, in order. None,
    for all that it sees, when it does not know which of the machine's processes it is."""
    if found.local_index is None or found.num_processes is None or config.mesh.simulate_devices:
        return None
    share = math.ceil(config.mesh.world / found.num_processes)
    return list(range(found.local_index * share, (found.local_index + 1) * share))


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _keep_stdout_for_results() -> None:
    """Sends what libraries write to file 1 to stderr: gloo greets its peers there, and NCCL logs."""
    try:
        if sys.stdout.fileno() != 1:
            return
    except (OSError, ValueError):
        return  # a notebook's
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(own, "w", buffering=1 if os.isatty(own) else -1, encoding=encoding, errors=errors)  # noqa: SIM115


def _name_logs(index: int) -> None:
    """Log records say which process they come from."""
    made = logging.getLogRecordFactory()

    def named(*args: object, **kwargs: object) -> logging.LogRecord:
        record = made(*args, **kwargs)
        record.name = f"process {index}: {record.name}"
        return record

    logging.setLogRecordFactory(named)

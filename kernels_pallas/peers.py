"""Programs of other libraries that the kernels are timed beside, in the same process: `bench.py --peers`.

A peer's package is imported when the peer is measured and never otherwise. None of them has one of these operations as
the model needs it, so each says what it leaves out. They are given the kernel's inputs, and before one is timed its
results are compared with those of the reference: what computes something else is no peer. The time of PyTorch's is that
of the GPU alone: the calls are recorded as one CUDA graph and timed by its events.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import statistics
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

TIMES, CALLS = 5, 10
REASON = 400  # characters of why a peer refused


class Measured(NamedTuple):
    """seconds: of one call. error: how far its results are from the reference's, in the measure of its operation."""

    seconds: float
    error: float


@dataclasses.dataclass(frozen=True)
class Peer:
    """omits: what of the kernel's work it does not do. measure: of its imported package. bound: of the error; what is
    further from the reference computes something else."""

    name: str
    package: str
    omits: str
    measure: Callable[[Any], Measured]
    bound: float


def measured(peer: Peer, flops: int = 0) -> dict[str, Any]:
    """A row of results: name, version, what it omits, its error, and its microseconds or why there are none.

    flops: of one call as the kernel's are counted; 0 where operations are not what takes the time.
    """
    row: dict[str, Any] = {"name": peer.name, "version": None, "omits": peer.omits}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            package = importlib.import_module(peer.package)
            try:
                row["version"] = version(peer.package)
            except PackageNotFoundError:
                row["version"] = getattr(package, "__version__", None)
            found = peer.measure(package)
        except ModuleNotFoundError as missing:
            return {**row, "why": f"{missing.name} is not installed"}
        except Exception as error:  # whatever another library raises for what it does not take
            words = [str(error), *(str(warning.message) for warning in said)]  # PyTorch tells the reason in warnings
            whole = " ".join(" ".join(words).split())
            return {**row, "why": f"{type(error).__name__}: {whole[:REASON]}"}
    if not found.error <= peer.bound:  # also where it is not a number
        return {**row, "why": f"it computes something else: an error of {found.error:.3g}, the bound is {peer.bound:g}"}
    row |= {"error": found.error, "us": found.seconds * 1e6}
    return {**row, "tflop_per_s": flops / found.seconds / 1e12} if flops else row


def difference(results: Sequence[np.ndarray], wanted: Sequence[Any]) -> float:
    """The largest, over pairs of arrays, root mean square of their difference, as a share of that of `wanted`."""
    shares = []
    for result, exact in zip(results, wanted, strict=True):
        exact = np.asarray(exact).astype(np.float32)
        if result.shape != exact.shape:
            raise ValueError(f"a result of shape {result.shape}, the reference's is {exact.shape}")
        apart = np.linalg.norm((result.astype(np.float32) - exact).ravel())
        shares.append(float(apart / np.linalg.norm(exact.ravel())))
    return max(shares, key=lambda share: np.inf if np.isnan(share) else share)


# ---- PyTorch ----


def torch_seconds(torch: Any, call: Callable[[], Any], calls: int = CALLS) -> float:
    """Median time of one call on the GPU, compilation left out."""
    side = torch.cuda.Stream()  # what is recorded has to have run on a stream that is not the default one
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(1 + TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times[1:])


def torch_peer(
    name: str,
    omits: str,
    prepare: Callable[[Any, str], Callable[[], Any]],
    error: Callable[[tuple[np.ndarray, ...]], float],
    bound: float,
    calls: int = CALLS,
) -> Peer:
    """A peer whose call `prepare(torch, device)` makes, its arrays beside it.

    error: of what the first call gives, an array or a tuple of them; bfloat16 comes as float32.
    """

    def run(torch: Any) -> Measured:
        call = prepare(torch, "cuda")
        apart = error(numpy_of(torch, call()))
        return Measured(torch_seconds(torch, call, calls), apart)

    def measure(torch: Any) -> Measured:
        if not torch.cuda.is_available():
            raise RuntimeError("it needs a GPU")
        try:
            return run(torch)
        finally:
            gc.collect()
            torch.cuda.empty_cache()

    return Peer(name, "torch", omits, measure, bound)


def torch_of(torch: Any, array: Any, device: str) -> Any:
    """A tensor of an array of JAX or NumPy, by way of the host."""
    host = np.array(array, order="C")  # a copy: PyTorch wants to be able to write
    if host.dtype.name == "bfloat16":
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(host).to(device)


def numpy_of(torch: Any, results: Any) -> tuple[np.ndarray, ...]:
    """On the host, a tuple of what is one or more tensors."""
    tensors = results if isinstance(results, tuple) else (results,)
    return tuple((t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy() for t in tensors)


def compiled(torch: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """For the shapes of its first call alone: after those of other workloads they would be compiled as variables."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def torch_site(torch: Any, arrays: tuple[Any, ...], *, iterations: int, eps: float, rms_eps: float) -> tuple[Any, ...]:
    """`hyper_connections.api.fused_site` of one layer in PyTorch's operations.

    arrays: y [T, D], streams [T, hc, D], post, comb, pre, fn [(2 + hc) hc, hc D], base, scale [3], norm_weight [D].
    """
    y, streams, post, comb, pre, fn, base, scale, norm_weight = arrays
    rows, hc, _ = streams.shape
    x = streams.float()
    written = post[..., None] * y.float()[:, None, :]
    for j in range(hc):
        written = written + comb[:, j, :, None] * x[:, j, None, :]
    streams = written.to(streams.dtype)
    x = streams.float()
    flat = x.reshape(rows, -1)
    z = (flat @ fn.T) / torch.sqrt((flat * flat).mean(-1, keepdim=True) + rms_eps)
    new_pre = torch.sigmoid(z[:, :hc] * scale[0] + base[:hc]) + eps
    new_post = 2 * torch.sigmoid(z[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    m = torch.softmax((z[:, 2 * hc :] * scale[2] + base[2 * hc :]).reshape(rows, hc, hc), -1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    collapsed = (pre[..., None] * x).sum(-2).to(y.dtype).float()
    normed = norm_weight.float() * collapsed / torch.sqrt((collapsed * collapsed).mean(-1, keepdim=True) + rms_eps)
    return streams, normed.to(y.dtype), new_pre, new_post, m


def torch_index(torch: Any, query: Any, weights: Any, keys: Any, k: int, weigh: Callable[[Any, Any], Any]) -> Any:
    """The k best entries [T, k], in no order: query [T, H, d], weights fp32 [T, H], keys [S, N, d] of T / S rows each.

    weigh: `torch_weigh`, compiled or not.
    """
    rows, heads, dim = query.shape
    found, per = [], rows // keys.shape[0]
    if per == 1:
        return torch.topk(weigh(torch.bmm(query, keys.transpose(1, 2)), weights), k, sorted=False).indices
    block = min(per, 128)  # of all rows at once the products would take 4 GB
    for first in range(0, rows, block):
        own = query[first : first + block].reshape(-1, dim)
        dots = (own @ keys[first // per].T).reshape(block, heads, -1)
        found.append(torch.topk(weigh(dots, weights[first : first + block]), k, sorted=False).indices)
    return torch.cat(found)


def torch_weigh(dots: Any, weights: Any) -> Any:
    """sum_h w_h relu(dots_h): [T, H, N], [T, H] -> fp32 [T, N]."""
    return (dots.relu().float() * weights[..., None]).sum(1)


def torch_attention(torch: Any, query: Any, kv: Any, scale: float, backend: str) -> Any:
    """query [T, 1, H, d] over kv [T, 1, K, d], key and value in one, by a backend of scaled_dot_product_attention."""
    attention = importlib.import_module("torch.nn.attention")
    with attention.sdpa_kernel([getattr(attention.SDPBackend, backend)]):
        return torch.nn.functional.scaled_dot_product_attention(query, kv, kv, scale=scale)


def torch_sink_attention(
    torch: Any, query: Any, kv: Any, sink: Any, cos: Any, sin: Any, scale: float, gather: bool = False
) -> Any:
    """query [T, H, d] over kv [T, K, d], with a sink [H] in the denominator; the result is rotated back.

    cos, sin: fp32 [T, rope / 2], of the last channels in adjacent pairs. gather: kv is (keys [N, d], int64 [T, K] which
    of them each row attends to).
    """
    if gather:
        keys, rows = kv
        kv = keys[rows]
    logits = torch.bmm(query, kv.transpose(1, 2)).float() * scale
    peak = torch.maximum(logits.amax(-1), sink)[..., None]
    weights = torch.exp(logits - peak)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink[:, None] - peak)
    out = torch.bmm((weights / total).to(kv.dtype), kv)
    tail = out[..., -2 * cos.shape[-1] :].float().unflatten(-1, (-1, 2))
    a, b, cos, sin = tail[..., 0], tail[..., 1], cos[:, None], sin[:, None]
    turned = torch.stack([a * cos + b * sin, b * cos - a * sin], -1).flatten(-2).to(out.dtype)
    return torch.cat([out[..., : -turned.shape[-1]], turned], -1)

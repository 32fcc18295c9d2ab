"""Programs of other libraries that the kernels are timed beside, in the same process: `bench.py --peers`.

A peer's package is imported when the peer is measured and never otherwise. None of them has one of these operations as
the model needs it, so each says what it leaves out. Those of PyTorch make random arrays of the released shapes for
themselves. Their time is that of the GPU alone: the calls are recorded as one CUDA graph and timed by its events.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TIMES, CALLS = 5, 10
REASON = 400  # characters of why a peer refused


@dataclasses.dataclass(frozen=True)
class Peer:
    """omits: what of the kernel's work it does not do. seconds: of one call, from its imported package."""

    name: str
    package: str
    omits: str
    seconds: Callable[[Any], float]


def measured(peer: Peer) -> dict[str, Any]:
    """A row of results: name, version, what it omits, and its microseconds or why there are none."""
    row: dict[str, Any] = {"name": peer.name, "version": None, "omits": peer.omits}
    try:
        package = importlib.import_module(peer.package)
    except ImportError:
        return {**row, "why": f"{peer.package} is not installed"}
    try:
        row["version"] = version(peer.package)
    except PackageNotFoundError:
        row["version"] = getattr(package, "__version__", None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return {**row, "us": peer.seconds(package) * 1e6}
        except Exception as error:  # whatever another library raises for what it does not take
            words = [str(error), *(str(warning.message) for warning in said)]  # PyTorch tells the reason in warnings
            whole = " ".join(" ".join(words).split())
            return {**row, "why": f"{type(error).__name__}: {whole[:REASON]}"}


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


def torch_peer(name: str, omits: str, prepare: Callable[[Any, str], Callable[[], Any]], calls: int = CALLS) -> Peer:
    """A peer whose call `prepare(torch, device)` makes, its arrays beside it."""

    def seconds(torch: Any) -> float:
        if not torch.cuda.is_available():
            raise RuntimeError("it needs a GPU")
        torch.manual_seed(0)
        taken = torch_seconds(torch, prepare(torch, "cuda"), calls)
        torch.cuda.empty_cache()
        return taken

    return Peer(name, "torch", omits, seconds)


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

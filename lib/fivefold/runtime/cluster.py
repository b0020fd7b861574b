"""A modelled cluster: GPUs, the links between them, and which rank stands where.

    cluster("h100")                          8 GPUs a server, as many servers as the ranks need
    cluster("h100", gpus_per_server=4)       the same with smaller servers
    cluster("h100").placed({"tp": 4, "dp": 16}, innermost=("dp", "tp"))

A message of M bytes takes α + M/β on a link of latency α and bandwidth β: the model of Hockney (1994), which every
formula of this course uses. It knows no congestion, no protocol and no topology above the server. Figures are what
makers publish, one direction of a link, dense bf16 for FLOPs; what a program reaches is less, hence `efficiency`.

| figure | value | source |
| --- | --- | --- |
| A100 80 GB SXM | 312 TFLOPS, 80 GB, 2.039 TB/s | NVIDIA, A100 Tensor Core GPU datasheet (2021) |
| H100 SXM | 989.4 TFLOPS, 80 GB, 3.35 TB/s | NVIDIA, H100 datasheet and architecture paper (2022): 1,978.9 sparse |
| H800 SXM | as H100 | as H100: only NVLink and fp64 are cut down; DeepSeek-V3 report (2024), section 3.1 for its use |
| H200 SXM | 989.4 TFLOPS, 141 GB, 4.8 TB/s | NVIDIA, H200 datasheet (2024) |
| NVLink 3, 4, 5 | 300, 450, 900 GB/s | half of the 600, 900, 1800 GB/s in the A100, H100 and B200 datasheets |
| NVLink of H800 | 160 GB/s | DeepSeek-V3 report, section 3.2.2: what they reach; nominally 400/2 = 200 |
| InfiniBand EDR, HDR, NDR | 12.5, 25, 50 GB/s | 100, 200, 400 Gb/s: InfiniBand Trade Association's roadmap |
| RoCE | 50 GB/s | Llama 3 report (2024), section 3.3.1: 400 Gb/s between GPUs |
| NIC a GPU | one | DGX A100 and H100 datasheets (8 NICs for compute, 8 GPUs); Llama 3 report, section 3.3.1 |
| α of NVLink | 1.9 µs | NCCL, src/graph/tuning.cc: one step of a ring, protocol LL128 |
| α of a network | 4.0 µs | the same table, "NET"; taken for RoCE too, for which NCCL has no other |

The α of LL128 is taken because that protocol nearly keeps the link's bandwidth (120 of 128 bytes); LL has a lower α at
a quarter to half of it, Simple a higher one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product


@dataclass(frozen=True)
class GPU:
    """`flops` a second in dense bf16, `memory` in bytes, `memory_bandwidth` in bytes a second."""

    name: str
    flops: float
    memory: float
    memory_bandwidth: float


@dataclass(frozen=True)
class Link:
    """`alpha` in seconds a message, `bandwidth` in bytes a second, one direction."""

    name: str
    alpha: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """α + M/β for a message of `size` bytes."""
        return self.alpha + size / self.bandwidth


A100 = GPU("A100", 312e12, 80e9, 2.039e12)
H100 = GPU("H100", 989.4e12, 80e9, 3.35e12)
H800 = GPU("H800", 989.4e12, 80e9, 3.35e12)
H200 = GPU("H200", 989.4e12, 141e9, 4.8e12)

NVLINK_ALPHA, NETWORK_ALPHA = 1.9e-6, 4.0e-6
NVLINK3 = Link("NVLink 3", NVLINK_ALPHA, 300e9)
NVLINK4 = Link("NVLink 4", NVLINK_ALPHA, 450e9)
NVLINK5 = Link("NVLink 5", NVLINK_ALPHA, 900e9)
NVLINK_H800 = Link("NVLink of H800", NVLINK_ALPHA, 160e9)
EDR = Link("InfiniBand EDR", NETWORK_ALPHA, 12.5e9)
HDR = Link("InfiniBand HDR", NETWORK_ALPHA, 25e9)
NDR = Link("InfiniBand NDR", NETWORK_ALPHA, 50e9)
ROCE = Link("RoCE 400 Gb/s", NETWORK_ALPHA, 50e9)
INSTANT = Link("an instant link", 0.0, math.inf)


@dataclass(frozen=True)
class Cluster:
    """Servers of `gpus_per_server` GPUs, linked by `inside`; every GPU has a link `between` servers of its own.

    Rank r stands in slot r, or in slot `placement[r]`; slots of a server follow one another. `efficiency` is the share
    of `gpu.flops` that computation reaches.
    """

    gpu: GPU = field(default=H100, hash=False)  # a cluster is a key of many caches: its hash is to be quick
    inside: Link = field(default=NVLINK4, hash=False)
    between: Link = field(default=NDR, hash=False)
    gpus_per_server: int = 8
    efficiency: float = 1.0
    placement: tuple[int, ...] = field(default=(), repr=False, hash=False)

    def __post_init__(self) -> None:
        if self.gpus_per_server < 1:
            raise ValueError(f"a server of {self.gpus_per_server} GPUs holds no rank: give it 1 or more")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency {self.efficiency} is not a share: take a number above 0, up to 1")
        if len(set(self.placement)) != len(self.placement) or any(slot < 0 for slot in self.placement):
            raise ValueError("two ranks cannot stand in one slot: give each rank a slot of its own, from 0")

    def server(self, rank: int) -> int:
        """The server on which `rank` stands."""
        return (self.placement[rank] if self.placement else rank) // self.gpus_per_server

    def is_inside(self, a: int, b: int) -> bool:
        return self.server(a) == self.server(b)

    def link(self, a: int, b: int) -> Link:
        """The link between two ranks."""
        return self.inside if self.is_inside(a, b) else self.between

    def slowest_link(self, ranks: Sequence[int]) -> Link:
        """The link that holds up a ring through `ranks`: `between` as soon as they are not all on one server."""
        return self.inside if len({self.server(rank) for rank in ranks}) == 1 else self.between

    def servers(self, ranks: Sequence[int]) -> list[list[int]]:
        """The ranks of a group by server, servers in the order in which the group meets them."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.server(rank), []).append(rank)
        return list(found.values())

    def compute_seconds(self, flops: float) -> float:
        return flops / (self.gpu.flops * self.efficiency)

    def placed(self, degrees: Mapping[str, int], innermost: Sequence[str]) -> Cluster:
        """The same cluster with ranks placed in another order of the mesh's axes.

        `degrees` are the axes as ranks are numbered, the fastest first: {"tp": 2, "cp": 2, "dp": 4}. `innermost` names
        the same axes in the order in which they fill the servers. Raises ValueError where the two differ.
        """
        if sorted(degrees) != sorted(innermost):
            raise ValueError(f"the order {tuple(innermost)} must name each of {tuple(degrees)} once")
        slots = []
        for place in product(*(range(n) for n in reversed(degrees.values()))):
            where = dict(zip(reversed(degrees), place, strict=True))
            slot = 0
            for axis in reversed(innermost):
                slot = slot * degrees[axis] + where[axis]
            slots.append(slot)
        return replace(self, placement=tuple(slots))


PRESETS = {
    "a100": Cluster(A100, NVLINK3, HDR),
    "h100": Cluster(H100, NVLINK4, NDR),
    "h800": Cluster(H800, NVLINK_H800, NDR),
    "h200": Cluster(H200, NVLINK4, NDR),
    "llama3": Cluster(H100, NVLINK4, ROCE),
    "instant": Cluster(H100, INSTANT, INSTANT),
}


def cluster(name: str = "h100", **changes: object) -> Cluster:
    """A preset by name (a100, h100, h800, h200, llama3, instant), with fields changed; ValueError for another name."""
    if name not in PRESETS:
        raise ValueError(f"no cluster called {name!r}: choose {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes)

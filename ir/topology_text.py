"""Reads what NVIDIA's tools print about one node: `nvidia-smi topo -m` and NCCL's topology XML.

Input: the text (NCCL writes its XML where NCCL_TOPO_DUMP_FILE says), and how many such nodes
there are. Output: the device's name and the `Level`s of the cluster, innermost first.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from xml.etree import ElementTree

from ir.device import Link, find_device, inner_link
from ir.errors import UsageError
from ir.topology import NETWORK, NODE, Level, network, pcie, reduction_rate

# NVLinks of a device, all together (NVIDIA data sheets); the link rate is the table's over these.
_NVLINKS = {"V100-16GB": 6, "V100-32GB": 6, "A800-80GB": 8, "RTX-3090": 4} | dict.fromkeys(
    ("H100-SXM", "H100-96GB", "H200-SXM", "H200-NVL", "B200", "B300", "GB200", "GB300"), 18
)
_USUAL_NVLINKS = 12  # A100, H100-PCIe, H100-NVL
_PCIE_WORDS = ("PIX", "PXB", "PHB", "NODE", "SYS")
# Between sockets a pair gets what QPI or UPI give: 10 to 22 GB/s, NCCL 2.30.7 src/graph/topo.h.
_SOCKETS_RATE = 20e9
_NAMES_BY_SM = {"70": "V100", "75": "T4", "80": "A100", "86": "RTX-3090", "89": "L40S"} | {
    "90": "H100-SXM", "100": "B200", "103": "B300"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Node:
    """What a tool says: NVLinks by pair (absent: none), whether a switch joins them, pairs that
    meet without leaving their socket, NICs."""

    size: int
    nvlinks: dict[tuple[int, int], int]
    is_switched: bool
    near: frozenset[tuple[int, int]]
    nics: int
    nic_bytes_per_s: float | None = None


def levels_from_nvidia_smi(text: str, device: str, nodes: int = 1) -> tuple[Level, ...]:
    """The levels of `nodes` nodes that look like this `nvidia-smi topo -m` matrix."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0" and "X" not in row), None)
    named = {row[0]: row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0])}
    table = {name: cells for name, cells in named.items() if "X" in cells}
    if header is None or not table:
        raise UsageError(
            "this is not the output of `nvidia-smi topo -m`: no row of GPU0 with an X was found. "
            "Paste all of it, with the header line."
        )
    gpus = [column for column in header if re.fullmatch(r"GPU\d+", column)]
    if sorted(gpus) != sorted(table) or any(len(cells) < len(gpus) for cells in table.values()):
        raise UsageError(
            f"`nvidia-smi topo -m`: the header has {len(gpus)} GPUs, {len(table)} rows follow."
        )
    cells = {
        (a, b): table[row][b] for a, row in enumerate(gpus) for b in range(len(gpus)) if a != b
    }
    unknown = [c for c in cells.values() if not re.fullmatch(r"NV\d+", c) and c not in _PCIE_WORDS]
    if unknown:
        raise UsageError(f"`nvidia-smi topo -m`: {unknown[0]!r} is no known kind of link.")
    _check_symmetric(cells)
    nvlinks = {pair: int(cell[2:]) for pair, cell in cells.items() if cell.startswith("NV")}
    per_device = sum(count for (a, _), count in nvlinks.items() if a == 0)
    nic_columns = [c for c in header if re.fullmatch(r"NIC\d+|mlx\d_\d+|.*_bond_?\d+", c)]
    node = _Node(
        size=len(gpus),
        nvlinks=nvlinks,
        is_switched=per_device > _count_of_links(device),
        near=frozenset(pair for pair, cell in cells.items() if cell != "SYS"),
        nics=len(nic_columns),
    )
    return _levels(node, device, nodes)


def _check_symmetric(cells: dict[tuple[int, int], str]) -> None:
    """A link leads both ways: GPU0's cell for GPU1 is GPU1's for GPU0."""
    for (a, b), cell in cells.items():
        if cells[b, a] != cell:
            raise UsageError(
                f"`nvidia-smi topo -m`: GPU{a} has {cell} to GPU{b}, and GPU{b} has {cells[b, a]} "
                f"to GPU{a}; both must be the same. Paste the output as it was printed."
            )


def levels_from_nccl_xml(
    text: str, device: str | None, nodes: int = 1
) -> tuple[str, tuple[Level, ...]]:
    """The device's name and the levels of `nodes` nodes that look like this NCCL topology."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise UsageError(f"this is not XML as NCCL_TOPO_DUMP_FILE gives it: {error}.") from error
    places = [pci for pci in root.iter("pci") if pci.find("gpu") is not None]
    if root.tag != "system" or not places:
        raise UsageError("this XML has no <system> with <gpu> in it, as NCCL writes.")
    places.sort(key=lambda pci: int(_gpu(pci).get("dev", "0")))
    index = {pci.get("busid", "").lower(): n for n, pci in enumerate(places)}
    name = device or _NAMES_BY_SM.get(_gpu(places[0]).get("sm", ""), "")
    if not name:
        sm = _gpu(places[0]).get("sm")
        raise UsageError(f"NCCL's XML says only sm={sm!r}; name the device as well.")
    nvlinks: dict[tuple[int, int], int] = {}
    is_switched = False
    for a, pci in enumerate(places):
        for link in _gpu(pci).iter("nvlink"):
            count, b = int(link.get("count", "1")), index.get(link.get("target", "").lower())
            if b is not None:
                nvlinks[a, b] = count
            else:  # an NVSwitch: it leads to every other device
                is_switched = True
                for b in set(range(len(places))) - {a}:
                    nvlinks[a, b] = nvlinks.get((a, b), 0) + count
    ports = {
        net.get("name", ""): float(net.get("speed", "0")) / 8 * 1e6 for net in root.iter("net")
    }
    socket = {
        id(pci): n for n, cpu in enumerate(root.iter("cpu")) for pci in cpu.iter("pci")
    }  # fmt: skip
    homes = [socket.get(id(pci), 0) for pci in places]
    node = _Node(
        size=len(places),
        nvlinks=nvlinks,
        is_switched=is_switched,
        near=frozenset(
            (a, b) for a in range(len(places)) for b in range(len(places))
            if homes[a] == homes[b] or (a, b) in nvlinks
        ),
        nics=len(ports),
        nic_bytes_per_s=min(ports.values()) if ports else None,
    )
    return name, _levels(node, name, nodes)


def _gpu(pci: ElementTree.Element) -> ElementTree.Element:
    gpu = pci.find("gpu")
    assert gpu is not None
    return gpu


def _levels(node: _Node, device: str, nodes: int) -> tuple[Level, ...]:
    """NVLink islands, what PCIe joins in a socket, sockets; the outermost of these is the node."""
    levels: tuple[Level, ...] = ()
    island, host = _nvlink_island(node), pcie(device)
    if island > 1:
        link = _nvlink(node, device, island)
        levels += (Level(island, link, "NVLink", nvls=reduction_rate(device, link)),)
    socket = _grouped(node.size, node.near) or island
    if socket > island or not levels:
        levels += (Level(socket // island, host, "socket"),)
    if node.size > socket:  # all devices of a socket share what joins it to the others
        rate = min(host.bandwidth_bytes_per_s, _SOCKETS_RATE / host.achievable)
        between = replace(host, bandwidth_bytes_per_s=rate)
        levels += (Level(node.size // socket, between, NODE, devices_per_port=socket),)
    inner = tuple(level for level in levels[:-1] if level.size > 1)
    return (*inner, replace(levels[-1], name=NODE), *_network_levels(node, device, nodes))


def _network_levels(node: _Node, device: str, nodes: int) -> tuple[Level, ...]:
    if nodes == 1:
        return ()
    link = network(device)
    if node.nic_bytes_per_s:
        link = replace(link, bandwidth_bytes_per_s=node.nic_bytes_per_s)
    shared = ceil(node.size / node.nics) if node.nics else 1
    return (Level(nodes, link, NETWORK, devices_per_port=shared),)


def _nvlink_island(node: _Node) -> int:
    """How many consecutive devices NVLink joins; `UsageError` if islands are not alike."""
    size = _grouped(node.size, node.nvlinks)
    if size is None:
        raise UsageError(_uneven(_groups(node.size, node.nvlinks)))
    return size


def _uneven(group: list[int]) -> str:
    """Why these groups are no islands: a wrong order, which can be changed, or unlike sizes."""
    sizes = [group.count(least) for least in sorted(set(group))]
    if len(set(sizes)) == 1:
        order = ",".join(str(n) for n in sorted(range(len(group)), key=lambda n: (group[n], n)))
        return (
            "NVLink joins devices that are not neighbours in number. Start with "
            f"CUDA_VISIBLE_DEVICES={order} and describe that order."
        )
    return (
        f"NVLink joins groups of unlike size, {', '.join(map(str, sizes))} devices, in any order. "
        "Describe the node without `topology`, with `levels` at a rate that all devices have, or "
        "use only groups of one size."
    )


def _grouped(count: int, pairs: Iterable[tuple[int, int]]) -> int | None:
    """The size of the groups that `pairs` join, if all are alike and of consecutive devices."""
    group = _groups(count, pairs)
    size = group.count(0)
    is_even = count % size == 0 and all(group[n] == n // size * size for n in range(count))
    return size if is_even else None


def _groups(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Per device the least device of the group that `pairs` join it to."""
    group = list(range(count))
    for a, b in pairs:
        low, high = sorted((group[a], group[b]))
        group = [low if i == high else i for i in group]
    return group


def _nvlink(node: _Node, device: str, island: int) -> Link:
    """The link of an island: its rate counts the NVLinks that lead to other members."""
    link = inner_link(device, 2)
    if link.name != "NVLink":
        raise UsageError(f"{device} has no NVLink, but NVLinks are listed; is it the device?")
    per_link = link.bandwidth_bytes_per_s / _count_of_links(device)
    counts = [sum(c for (a, _), c in node.nvlinks.items() if a == n) for n in range(node.size)]
    if node.is_switched:
        counts = [max(c for (a, _), c in node.nvlinks.items() if a == n) for n in range(node.size)]
    rate = min(link.bandwidth_bytes_per_s, min(counts) * per_link)
    is_mesh = not node.is_switched and island > 2
    return replace(link, bandwidth_bytes_per_s=rate, point_to_point=is_mesh)


def _count_of_links(device: str) -> int:
    return _NVLINKS.get(find_device(device).name, _USUAL_NVLINKS)

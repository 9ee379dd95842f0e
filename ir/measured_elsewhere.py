"""Hardware elsewhere: the cluster file that it gets, and whether nccl-tests outputs are of it.

Input: a spec or a cluster.yaml, where the new file is to lie, and outputs that were read. Output:
the values of the new file, which describe the same cluster. Outputs of other hardware are refused.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ir.cluster import Cluster
from ir.cluster_file import described
from ir.detect import catalogue_name
from ir.errors import UsageError
from ir.nccl_tests import NcclTests
from ir.spec import machine_in
from ir.topology import CPU
from ir.yaml_values import Values, load_yaml

HARDWARE = "Name the GPUs that they ran on, as in --cluster 4x8xH100-SXM."


def cluster_values(spec: str, out: Path) -> tuple[Values, Cluster]:
    """A file's values for hardware that is described and not measured, and that hardware.

    `UsageError` for a CPU, and for nodes that differ.
    """
    cluster = Cluster.parse(spec)
    if cluster.device.name == CPU:
        raise UsageError(f"--cluster {spec}: nccl-tests are of GPUs. {HARDWARE}")
    if cluster.nodes:
        raise UsageError(
            f"--cluster {spec}: nodes that differ can't share what was measured of one. Calibrate "
            "each kind of node to a file of its own."
        )
    values = _values(spec, cluster)
    if "topology" in values:
        values["topology"] = _as_seen_from(out, Path(spec).parent / str(values["topology"]))
    written = replace(described_by(values, out), calibration=None)
    if written != replace(cluster, calibration=None):
        raise UsageError(
            f"--cluster {spec}: a file with a device and counts would be another cluster. Describe "
            "it in a cluster.yaml and give that as --cluster."
        )
    return values, cluster


def described_by(values: Values, path: Path) -> Cluster:
    """What a file with these values would be at `path`; `UsageError` if it could not be read."""
    return Cluster(**described(values, path))


def _values(spec: str, cluster: Cluster) -> Values:
    if spec.endswith((".yaml", ".yml")):
        return load_yaml(Path(spec))
    name = cluster.device.name
    if spec.endswith(".xml"):
        return {"device": name, "topology": Path(spec).name}
    nodes = cluster.n_devices // cluster.devices_per_node
    if machine := machine_in(spec):
        return {"machine": machine.name, "nodes": nodes}
    return {"device": name, "nodes": nodes, "devices_per_node": cluster.devices_per_node}


def _as_seen_from(out: Path, file: Path) -> str:
    """A file's path relative to the folder of `out`."""
    return os.path.relpath(file.parent.resolve() / file.name, out.parent.resolve())


def measured_on(
    cluster: Cluster, read: Sequence[NcclTests]
) -> tuple[list[NcclTests], list[str]]:
    """The outputs with their ranks placed as this cluster's groups are, and what could not be
    compared; `UsageError` for an output of other hardware."""
    placed: list[NcclTests] = []
    notes: list[str] = []
    for found in read:
        _check_place(cluster, found)
        notes += _check_devices(cluster, found)
        placed.append(_in_domain(cluster, found))
    return placed, notes


def _check_place(cluster: Cluster, found: NcclTests) -> None:
    """Raises `UsageError` for ranks that lie as no group of the cluster does."""
    per_node = cluster.devices_per_node
    nodes = cluster.n_devices // per_node
    most, hosts = max(found.on_hosts), len(found.on_hosts)
    if most > per_node or hosts > nodes:
        raise UsageError(
            f"{found.name}: it has {hosts} x {most} ranks (hosts x ranks of one); {cluster} has "
            f"{nodes} x {per_node} devices, so no group of it lies so. {HARDWARE}"
        )
    if min(found.on_hosts) < most:
        counts = ", ".join(str(count) for count in found.on_hosts)
        raise UsageError(
            f"{found.name}: its hosts have {counts} ranks. What is measured prices groups with as "
            "many members on every host: run it with as many ranks on each."
        )


def _in_domain(cluster: Cluster, found: NcclTests) -> NcclTests:
    """Where one NVLink domain joins all nodes, the ranks of all hosts are near."""
    if not cluster.devices_per_node < cluster.near_devices == cluster.n_devices:
        return found
    collective = replace(found.collective, members_near=found.collective.members)
    return replace(found, collective=collective)


def _check_devices(cluster: Cluster, found: NcclTests) -> Iterator[str]:
    """Raises `UsageError` for another device; a name that the catalogue lacks is said."""
    expected = cluster.device.name.partition(":")[0]
    for printed in found.devices:
        try:
            name = catalogue_name(printed).partition(":")[0]
        except UsageError:
            yield (
                f"{found.name}: its ranks are on {printed!r}, which the catalogue does not know, "
                f"so it is not compared with {expected}"
            )
            continue
        if name != expected:
            raise UsageError(
                f"{found.name}: its ranks are on {printed} ({name}); {cluster} has {expected}. "
                f"{HARDWARE}"
            )

"""How Kubernetes' providers mark spot nodes, and how pods are kept on them or off them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: The label of spot nodes, by cloud: its key and value.
LABELS = {
    "gke": ("cloud.google.com/gke-spot", "true"),
    "karpenter": ("karpenter.sh/capacity-type", "spot"),
    "eks": ("eks.amazonaws.com/capacityType", "SPOT"),
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),
}

#: Seconds that a pod has to leave a spot node: of 30 GKE keeps half for its own pods; EKS gives two minutes.
GRACE = {"any": 15, "gke": 15, "karpenter": 110, "eks": 110, "aks": 25}


def labels_of(cloud: str) -> dict[str, str]:
    """Return the labels of spot nodes in a cloud, or of all clouds for "any"."""
    return dict(LABELS.values() if cloud == "any" else [LABELS[cloud]])


def only_on(labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the affinity of a pod that runs only on nodes with one of these labels."""
    return _affinity([[_expression(key, "In", value)] for key, value in labels.items()])


def never_on(labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the affinity of a pod that runs on nodes with none of these labels."""
    return _affinity([[_expression(key, "NotIn", value) for key, value in labels.items()]])


def tolerations_of(labels: Mapping[str, str]) -> list[dict[str, str]]:
    """Return a pod's tolerations for taints named as the labels: AKS taints spot nodes so, and GKE's pages say to."""
    return [
        {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}
        for key, value in labels.items()
    ]


def _expression(key: str, operator: str, value: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": [value]}


def _affinity(terms: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return a node affinity: one of the terms must hold, with all its expressions."""
    listed = [{"matchExpressions": list(term)} for term in terms]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": listed}}
    return {"nodeAffinity": required}

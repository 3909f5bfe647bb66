"""osdp_ray: the fastest sharded-data-parallel schedule that fits the memory, on Ray.

The public names are below. Each is imported when it is first used: `import osdp_ray` loads neither torch nor ray.
"""

import importlib
from typing import Any

_HOMES = {
    "Workload": "osdp_ray.workload",
    "Cluster": "osdp_ray.records.cluster",
    "Profile": "osdp_ray.records.profile",
    "Plan": "osdp_ray.records.plan",
    "Prediction": "osdp_ray.records.plan",
    "Sample": "osdp_ray.records.telemetry",
    "Telemetry": "osdp_ray.records.telemetry",
    "OsdpError": "osdp_ray.errors",
    "discover": "osdp_ray.discovery",
    "profile": "osdp_ray.profiling",
    "plan": "osdp_ray.planning",
    "predict": "osdp_ray.costs",
    "parallelize": "osdp_ray.execution",
    "execute": "osdp_ray.execution",
    "recalibrate": "osdp_ray.replanning",
    "run": "osdp_ray.pipeline",
}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'osdp_ray' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

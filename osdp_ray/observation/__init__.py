"""Stage 5: what every worker measures in a step, and how it reaches the driver while training runs.

    worker:  Observer  --- push, fire and forget --->  TelemetryHub (actor)  <--- drain ---  HubClient: driver
                       <--- the reply is a command ---                       <--- command ---

`ray.train.report` is no channel for this: it is a barrier of up to seconds. Torch and ray are imported when used.
"""

from osdp_ray.observation.allocator import AllocatorPeak, StepMemory, persistent_bytes, resident_bytes
from osdp_ray.observation.hub import HubClient, Note, Observer, TelemetryHub, start_hub
from osdp_ray.observation.parquet import load_parquet, save_parquet
from osdp_ray.records.telemetry import Sample, Telemetry

__all__ = [
    "AllocatorPeak",
    "HubClient",
    "Note",
    "Observer",
    "Sample",
    "StepMemory",
    "Telemetry",
    "TelemetryHub",
    "load_parquet",
    "persistent_bytes",
    "resident_bytes",
    "save_parquet",
    "start_hub",
]

"""Fixtures of several unit tests."""

import pytest

from osdp_ray import pipeline
from tests.fake_run import World


@pytest.fixture
def world(monkeypatch):
    world = World()
    for name in ("connect", "discover", "recalibrate", "predict", "execute"):
        monkeypatch.setattr(pipeline, name, getattr(world, name))
    monkeypatch.setattr(pipeline, "make_profile", world.profile)
    monkeypatch.setattr(pipeline, "make_plan", world.plan)
    monkeypatch.setattr(pipeline, "drifted", lambda plan, telemetry: None)
    monkeypatch.setattr(pipeline, "start_hub", lambda run: world.hub)
    monkeypatch.setattr(pipeline, "_POLL_S", 0.005)
    monkeypatch.setattr(pipeline, "_ABORT_WAIT_S", 0.01)
    return world

from osdp_ray.modeling.materialize import build_on_meta

__all__ = ["build_on_meta"]

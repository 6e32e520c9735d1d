"""Requests on a simulated device, as `tunerd.testing` has them."""

from tunerd.testing.simulation import Story, World, member

__all__ = ["Story", "World", "member"]

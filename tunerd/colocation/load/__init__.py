"""Arrivals of requests, and what came of them."""

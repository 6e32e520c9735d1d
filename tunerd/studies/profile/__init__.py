"""Which share a model needs: its speed over shares, the knee, and the share for a latency."""

"""What a run tells those who watch it, while it lives and afterwards."""

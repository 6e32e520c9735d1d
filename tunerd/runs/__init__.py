"""One tuning run: its plan, its life, its folder, its finals."""

"""What to do next: events in, instructions out. No I/O, no clock, no Ray."""

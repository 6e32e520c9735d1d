"""Whether this host can tune, and whether tunerd can read a model, before anything is paid for."""

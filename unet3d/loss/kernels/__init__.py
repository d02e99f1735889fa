"""Loss terms on CUDA, each in one kernel."""

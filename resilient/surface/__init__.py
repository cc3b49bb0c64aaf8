"""What people and monitoring look at: command line, demo, benchmarks."""

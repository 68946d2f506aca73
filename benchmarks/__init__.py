"""What partgrad costs, beside hand-written JAX and its peers. `python -m benchmarks --help` says what there is."""

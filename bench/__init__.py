"""The benchmark: workloads driven over HTTP, each result a ratio against a peer measured in the same run."""

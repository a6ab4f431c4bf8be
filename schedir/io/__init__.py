"""Read and write files: programs, timelines, clusters, traces, and the terminal."""

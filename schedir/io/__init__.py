"""Read and write files of programs, timelines, clusters and traces, and print to the terminal."""

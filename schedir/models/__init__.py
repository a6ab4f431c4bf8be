"""Models: stages as functions of a configuration, for pipelines and tensor-parallel ranks."""

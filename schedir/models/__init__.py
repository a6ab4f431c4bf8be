"""Language models, built stage by stage from a configuration, with tensor parallelism."""

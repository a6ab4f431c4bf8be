"""Training a GPT: configuration, model, data, the loop and its processes."""

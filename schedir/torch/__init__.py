"""In the place of torch's schedules: `schedir.torch.Schedule`."""

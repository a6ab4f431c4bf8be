"""In the place of torch's schedules: `schedir.torch.Schedule`."""

from schedir.torch.schedule import Schedule

__all__ = ["Schedule"]

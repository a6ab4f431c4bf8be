"""In the place of torch's schedules: `schedir.torch.Schedule`."""

from schedir.extras import require

require("torch", "schedir.torch")  # before an import that would fail without a hint

from schedir.torch.schedule import Schedule  # noqa: E402

__all__ = ["Schedule"]

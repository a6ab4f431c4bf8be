"""In the place of torch's schedules: `schedir.torch.Schedule`."""

from schedir.extras import require

# Before 2.13, torch's stages have no gradients for some inputs that a stage may have: integers, and
# those that it does not use.
require("torch", "schedir.torch", lowest="2.13")

from schedir.torch.schedule import Schedule  # noqa: E402

__all__ = ["Schedule"]

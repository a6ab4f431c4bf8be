"""Run schedir's programs through the API of torch.distributed.pipelining."""

from schedir.extras import require_package

# In earlier versions of torch, stages fail if an input has no gradient: an integer tensor, or an
# input that the stage does not use.
require_package("torch", "schedir.torch_pipelining", min_version="2.13")

from schedir.torch_pipelining.schedule import Schedule  # noqa: E402
from schedir.torch_pipelining.torchtitan import patch_torchtitan  # noqa: E402

__all__ = ["Schedule", "patch_torchtitan"]

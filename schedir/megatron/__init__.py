"""Run schedir's schedules inside Megatron-LM, instead of Megatron's pipeline schedules."""

from schedir.extras import require_package

require_package("torch", "schedir.megatron")
require_package("megatron.core", "schedir.megatron", min_version="0.16")

from schedir.megatron.forward_backward_func import ForwardBackward, forward_backward  # noqa: E402
from schedir.megatron.vee_model import model_provider  # noqa: E402

__all__ = ["ForwardBackward", "forward_backward", "model_provider"]

"""The words that a schedule is written in, and the functions that join them."""

from schedir.schedules.schedule_algebra import *  # noqa: F403
from schedir.schedules.schedule_algebra import __all__ as __all__

"""The letters of the schedule algebra, and the functions that combine them."""

from schedir.schedules.schedule_algebra import *  # noqa: F403
from schedir.schedules.schedule_algebra import __all__ as __all__

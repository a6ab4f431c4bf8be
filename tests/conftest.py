from hypothesis import settings

# No deadline: a loaded machine must not fail a right answer.
settings.register_profile("schedir", parent=settings(), deadline=None)
settings.load_profile("schedir")

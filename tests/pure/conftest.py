from hypothesis import settings

from tests.cases import examples

settings.register_profile("pure", parent=settings(), max_examples=examples(100))
settings.load_profile("pure")

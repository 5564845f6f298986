"""Property tests here are deterministic: the same examples on every run, no example database, no deadline."""

from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, print_blob=False)
settings.load_profile("deterministic")

"""Property tests here are deterministic: the same examples on every run, no example database, no deadline."""

from hypothesis import settings

settings.load_profile("deterministic")

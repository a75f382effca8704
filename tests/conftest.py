"""What all tests share."""

from hypothesis import settings

# Hypothesis' deadline for an example is a timing assertion, and machines differ.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")

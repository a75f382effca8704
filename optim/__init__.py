"""Low-communication optimizers, each a recipe of a few small parts."""

"""How a model runs: the reference engine over transformers and the recompute executor."""

if not __name__.startswith("kvkin."):
    raise ImportError(f"import kvkin.engines instead of the bare name {__name__!r}")

"""Real texts and models from package registries, by `asset:NAME`."""

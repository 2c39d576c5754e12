"""Models in and out: presets, loading, saving, and which modules an adapter belongs to."""

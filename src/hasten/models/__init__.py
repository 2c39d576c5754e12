"""Models: presets, loading, saving, adapters."""

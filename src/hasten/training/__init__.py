"""The life of one training run: folder, metrics, saving, live tuning."""

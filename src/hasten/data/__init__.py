"""From what a user has on disk to token examples: formats, templates, tokenising, a corpus."""

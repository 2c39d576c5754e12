"""From what a user has on disk to token records: formats, templates, tokenising, a corpus."""

"""Watching runs while they go on and afterwards: a page, a terminal, figures for other tools."""

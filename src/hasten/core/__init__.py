"""The frame: slots, techniques, plans, jobs, and the step that they share."""

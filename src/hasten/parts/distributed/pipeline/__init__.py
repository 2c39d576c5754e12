"""Pipeline parallelism: schedules, stages, and their runners."""

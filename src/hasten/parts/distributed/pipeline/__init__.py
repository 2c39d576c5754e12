"""Pipeline parallelism: schedules, stages, and what runs them."""

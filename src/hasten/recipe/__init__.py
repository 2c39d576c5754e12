"""From a YAML recipe to a job and a plan; the only reader of the catalogue besides the tests."""

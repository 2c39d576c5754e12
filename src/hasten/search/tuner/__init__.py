"""The tuner: the best settings for one job on one machine, found by measuring few of them."""

"""What every switch gains on the user's own job: trials, statistics, guard, cost, report."""

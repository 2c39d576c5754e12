"""An arm's process that also knows the planted techniques; it speaks as ``hasten.measure.trial_process`` does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from evidence.planted_techniques import PLANTED
from hasten.measure.trial_process import main

if __name__ == "__main__":
    recipe, plan, orders, answers = sys.argv[1:]
    sys.exit(main(recipe, plan, int(orders), int(answers), more=PLANTED))

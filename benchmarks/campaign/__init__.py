"""Thousands of faults, by the kit of ``tests/faults``, on hasten and the same on other trainers.

| module | what is in it |
|---|---|
| ``run`` | chooses the next batch, says how far it is; stopped and continued at will |
| ``faults`` | what there is, and how often it is wanted |
| ``batch`` | one batch in a process of its own |
| ``lives`` | faults of any trainer: killed, damaged, cut off, on a full disk |
| ``own`` | faults that hasten alone is given |
| ``hasten_life``, ``transformers_life``, ``lightning_life`` | one run under each trainer |
| ``peers`` | what the latter two share |
| ``small_disk`` | a disk with no room, in a namespace of its own |
| ``ledger``, ``table`` | a line for each batch, and what they say together |
"""

"""The verification's side that computes: proofs on the user's own model, in a process of their
own.
"""

"""What the search and the evaluation share: arms, one prefill for many caches, caches side by side, readings.

Imports `installation` and what it is made of. `learning` and `evaluation` import from here.
"""

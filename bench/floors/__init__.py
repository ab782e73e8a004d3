"""What Fencepost is measured against. These files are frozen: a changed floor makes older figures incomparable.

tests/bench/test_bench.py holds their digest, so that a change is a decision.
"""

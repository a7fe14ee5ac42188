"""Bytes that nobody would write, thrown at everything that reads bytes.

`python -m tests.fuzz TARGET --runs N` searches with atheris, by coverage, from the golden
recordings on; `test_fuzz` does so for a moment in each test run, and replays every input that has
ever broken something (`crashers/TARGET/*`). A target takes any bytes and may raise nothing: what a
reader refuses, it must refuse as a CDCError, and the target swallows that.
"""

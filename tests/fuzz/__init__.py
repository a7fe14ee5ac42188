"""Malformed bytes, given to everything that reads bytes.

`python -m tests.fuzz TARGET --runs N` searches with atheris, guided by coverage, starting from the
golden recordings. `test_fuzz` does so briefly in each test run, and replays every input that has
ever broken something (`crashers/TARGET/*`). A target takes any bytes and must raise nothing: a
reader refuses input with a CDCError, which the target ignores.
"""

"""One suite for every store: the guarantees of `sinks.contract`, tested on each of them.

A store takes part with a plugin `tests/fixtures/store_<name>.py` that defines the fixture
`<name>_store`, a `tests.contract.under_test.StoreUnderTest`.
"""

"""One suite over every store: what `sinks.contract` promises, held by each.

A store takes part with a plugin `tests/fixtures/store_<name>.py` that defines the fixture
`<name>_store`, a `tests.contract.under_test.StoreUnderTest`.
"""

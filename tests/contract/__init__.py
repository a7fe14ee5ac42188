"""The suite `lockstep.conformance` on each of our stores.

A store takes part with a plugin `tests/fixtures/store_<name>.py` that defines the fixture
`<name>_store`, a `lockstep.conformance.store.StoreUnderTest`.
"""

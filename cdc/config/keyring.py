"""The section `keyring`: where the keys of encrypted columns are."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from cdc.config.secrecy import Address, OptionMap, Section


class KeyringConfig(Section, frozen=True, kw_only=True):
    """Where the keys are by which the mask `encrypt` hides columns (docs/ENCRYPTION.md)."""

    path: Annotated[
        Address | None,
        Meta(
            description="The keyring's file, on this machine's own disk; `cdc keys create` makes "
            "it. A relative path starts at the configuration file's folder.",
            examples=["keys.sqlite"],
        ),
    ] = None
    plugin: Annotated[
        str | None,
        Meta(
            description="A keyring by another package, instead of the file at `path`: the name of "
            "its entry point in the group `lockstep.keyrings`.",
            examples=["vault"],
        ),
    ] = None
    options: Annotated[
        dict[str, object],
        OptionMap(frozenset()),
        Meta(description="What the plugin takes.", examples=[{"url": "https://vault.example.com"}]),
    ] = {}

    @property
    def is_there(self) -> bool:
        """Whether a keyring is configured."""
        return self.path is not None or self.plugin is not None

"""Which values of the configuration are secrets: an annotation on each field's type defines it.

A field that may hold a secret has one of three types. A `Secret` is never shown. Of an `Address`, a
URL or a connection string, only what is known to be harmless is shown. `OptionMap` annotates a map
of free names, such as librdkafka's: an entry is shown only where its name is known to be harmless.
There is no list of the names of secrets, since such a list is never complete.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, get_args

import msgspec

MASK: Final = "***"


# Not tuples: typing's cache would treat equal tuples of two classes as one type.
class NeverShown(msgspec.Struct, frozen=True):
    """Annotates a value that is never shown."""

    def shown(self, _: tuple[str, ...], value: object) -> object:
        return None if value is None else MASK


class PartlyShown(msgspec.Struct, frozen=True):
    """Annotates a URL, a connection string or an address; its passwords are hidden."""

    def shown(self, _: tuple[str, ...], value: object) -> object:
        if value is None:
            return None
        return without_passwords(value) if isinstance(value, str) else MASK


class OptionMap(msgspec.Struct, frozen=True):
    """Annotates a map of free names, at any depth: only values of the listed names are shown.

    Names are compared in lower case. A prefix that names a section, such as `index.`, is ignored.
    """

    harmless: frozenset[str]
    prefix: str = ""

    def shown(self, names: tuple[str, ...], value: object) -> object:
        """Return what may be shown of the value at the path `names` below the map."""
        if isinstance(value, dict):
            return {name: self.shown((*names, name), each) for name, each in value.items()}
        name = names[-1].lower().removeprefix(self.prefix) if names else ""
        if name in self.harmless:
            return without_passwords(value) if isinstance(value, str) else value
        return None if value is None else MASK


Secrecy = NeverShown | PartlyShown | OptionMap

Secret = Annotated[str, NeverShown()]
Address = Annotated[str, PartlyShown()]


def secrecy_of(kind: Any) -> Secrecy | None:  # noqa: ANN401 - a type as a value
    """Return the annotation on a type, or on a member of its union."""
    for note in getattr(kind, "__metadata__", ()):
        if isinstance(note, NeverShown | PartlyShown | OptionMap):
            return note
    inner = (kind.__origin__,) if hasattr(kind, "__metadata__") else get_args(kind)
    if hasattr(kind, "__metadata__") or type(None) in inner:
        return next((note for each in inner if (note := secrecy_of(each)) is not None), None)
    return None


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section of the configuration."""

    def __repr__(self) -> str:
        """Return it with its secrets hidden."""
        shown = []
        for field in msgspec.structs.fields(self):
            value, note = getattr(self, field.name), secrecy_of(field.type)
            shown.append(f"{field.name}={(note.shown((), value) if note else value)!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- URLs and connection strings ---

# Parameters of libpq, redis-py and OpenSearch's client that are no secrets.
_PARAMETERS: Final = _names(
    """application_name channel_binding client_encoding connect_timeout db dbname decode_responses
    fallback_application_name gssencmode health_check_interval host hostaddr keepalives
    keepalives_count keepalives_idle keepalives_interval krbsrvname load_balance_hosts
    max_connections passfile port protocol replication requirepeer require_auth socket_timeout
    socket_connect_timeout ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_keyfile
    ssl_max_protocol_version ssl_min_protocol_version sslcert sslcompression sslcrl sslcrldir sslkey
    sslmode sslnegotiation sslrootcert sslsni target_session_attrs tcp_user_timeout timeout
    user"""
)
_KEYWORD: Final = re.compile(r"(\w+)(\s*=\s*)('(?:[^'\\]|\\.)*'?|(?:[^\s\\]|\\.)*)", re.DOTALL)
_HOST: Final = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")


def without_passwords(text: str) -> str:
    """Return a URL, connection string or address without what may be secret."""
    scheme, separator, rest = text.partition("://")
    if separator:
        return f"{scheme}://{_of_url(rest)}"
    if text.startswith(("/", ".", "~")):
        return text  # a file
    if "=" in text:
        return _of_keywords(text)
    _, at, host = text.rpartition("@")
    return f"{MASK}@{host}" if at else text


def _of_url(text: str) -> str:
    # Split at the last @: an unescaped password may contain @, and each of / ? # too.
    login, at, rest = text.rpartition("@")
    user, colon, _ = login.partition(":")
    rest, hash_, _ = rest.partition("#")
    place, question, query = rest.partition("?")
    if "?" in user:  # the @ is in the query
        return f"{user.partition('?')[0]}?{MASK}"
    shown = f"{user}{colon}{MASK if colon else ''}{at}{place}"
    return f"{shown}{question}{_of_query(query)}{hash_}{MASK if hash_ else ''}"


def _of_query(query: str) -> str:
    parts = []
    for part in query.split("&") if query else []:
        name, equals, _ = part.partition("=")
        if not equals:
            parts.append(MASK)
        else:
            parts.append(part if name.lower() in _PARAMETERS else f"{name}={MASK}")
    return "&".join(parts)


def _of_keywords(text: str) -> str:
    parts, end = [], 0
    for found in _KEYWORD.finditer(text):
        between = text[end : found.start()]
        parts.append(between if not between.strip() else f" {MASK} ")
        name, equals, value = found.groups()
        shown = value if name.lower() in _PARAMETERS else MASK
        parts.append(f"{name}{equals}{shown}")
        end = found.end()
    rest = text[end:]
    return "".join([*parts, rest if not rest.strip() else f" {MASK}"]).strip()


def has_password(text: str) -> bool:
    """Return whether a URL or connection string contains a password."""
    _, separator, rest = text.partition("://")
    if separator and ":" in _server(rest).rpartition("@")[0]:
        return True
    return bool(re.search(r"(?<!ssl)password\s*=", text, re.IGNORECASE))


def is_misread(url: str) -> bool:
    """Return whether a client would read a part of an unescaped password as a host or port.

    It would then quote that part in its error. A client ends the login at the first @, and the
    server at / ? or #.
    """
    _, separator, rest = url.partition("://")
    if not separator:
        return False
    server = _server(rest)
    path = rest.removeprefix(server).partition("?")[0]
    login, _, hosts = server.rpartition("@")
    return "@" in login + path or not all(map(_HOST.fullmatch, hosts.split(",")))


def has_login(path: str) -> bool:
    """Return whether the URL of a store contains a password or a token."""
    return "://" in path and without_passwords(path) != path


def _server(rest: str) -> str:
    """Return login and hosts of a URL; `rest` is what follows its `://`."""
    return re.split(r"[/?#]", rest, maxsplit=1)[0]


MISREAD: Final = (
    "a client would read a part of the login as host or port; in a user or password write"
    " @ as %40, : as %3A, / as %2F, ? as %3F, # as %23, % as %25"
)


LOGIN: Final = (
    "has a login in it, which messages and the store's own files would show: give it in `storage`"
    " of the follower, or in the environment"
)


# --- names that are known to be harmless ---

# librdkafka's: https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md
KAFKA: Final = _names(
    """acks allow.auto.create.topics api.version.request auto.offset.reset batch.num.messages
    batch.size broker.address.family broker.address.ttl check.crcs client.dns.lookup client.id
    client.rack compression.codec compression.level compression.type connections.max.idle.ms debug
    delivery.timeout.ms enable.ssl.certificate.verification fetch.error.backoff.ms fetch.max.bytes
    fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms fetch.wait.max.ms
    heartbeat.interval.ms linger.ms log.connection.close log_level max.in.flight
    max.in.flight.requests.per.connection max.partition.fetch.bytes max.poll.interval.ms
    message.copy.max.bytes message.max.bytes message.timeout.ms metadata.max.age.ms
    queue.buffering.max.kbytes queue.buffering.max.messages queue.buffering.max.ms
    queued.max.messages.kbytes queued.min.messages receive.message.max.bytes
    reconnect.backoff.max.ms reconnect.backoff.ms request.timeout.ms retry.backoff.max.ms
    retry.backoff.ms sasl.kerberos.keytab sasl.kerberos.principal sasl.kerberos.service.name
    sasl.mechanism sasl.mechanisms sasl.oauthbearer.method sasl.username security.protocol
    session.timeout.ms socket.connection.setup.timeout.ms socket.keepalive.enable
    socket.max.fails socket.nagle.disable socket.receive.buffer.bytes socket.send.buffer.bytes
    socket.timeout.ms ssl.ca.location ssl.certificate.location ssl.cipher.suites ssl.crl.location
    ssl.curves.list ssl.endpoint.identification.algorithm ssl.key.location ssl.keystore.location
    ssl.sigalgs.list statistics.interval.ms sticky.partitioning.linger.ms
    topic.metadata.refresh.interval.ms transaction.timeout.ms"""
)

# delta-rs': https://docs.rs/object_store
STORAGE: Final = _names(
    """allow_http aws_allow_http aws_bucket aws_conditional_put aws_copy_if_not_exists
    aws_default_region aws_endpoint aws_endpoint_url aws_region aws_s3_allow_unsafe_rename
    aws_s3_express aws_s3_locking_provider aws_skip_signature aws_unsigned_payload
    aws_virtual_hosted_style_request azure_container_name azure_endpoint
    azure_storage_account_name azure_use_azure_cli bucket conditional_put connect_timeout
    copy_if_not_exists default_region delta_dynamo_table_name endpoint endpoint_url google_bucket
    google_bucket_name pool_idle_timeout pool_max_idle_per_host region skip_signature timeout
    unsigned_payload virtual_hosted_style_request"""
)

# OpenSearch's index settings and field properties.
INDEX: Final = _names(
    """analyzer auto_expand_replicas coerce codec copy_to default_pipeline dims dimension
    doc_values dynamic eager_global_ordinals enabled engine fielddata filter format final_pipeline
    ignore_above ignore_malformed include_in_all index index_options knn language lowercase
    max_gram max_ngram_diff max_result_window method min_gram name norms normalizer
    number_of_replicas number_of_shards quote_analyzer refresh_interval scaling_factor
    search_analyzer similarity space_type store tokenizer total_fields.limit type
    mapping.total_fields.limit"""
)

"""`cdc prove` names every altered bit of the topics' records, in the files of a real broker."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from random import Random

import pytest
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

from cdc.log import names, topics
from cdc.verify import topics as proof
from tests.fixtures.archived import Archived
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
from tests.fixtures.seeds import first_seed

ALTERATIONS = 50
# Of a batch in a broker's file: where its length is, its attributes, and its first record.
_LENGTH, _ATTRIBUTES, _RECORDS = 8, 21, 61
_IS_CONTROL = 0x20
_DIGIT = re.compile(rb'":"?[a-z]?([0-9])')


@pytest.fixture
def written(pipeline: NewPipeline) -> PipelineUnderTest:
    """Return a pipeline whose log is complete: rows, logical messages, a dead letter."""
    made = pipeline(
        "CREATE TABLE users (id int PRIMARY KEY, name text)",
        log={"kafka": {"message.max.bytes": 60_000, "compression.type": "none"}},
    )
    made.start().wait_ready()
    for number in range(5):
        low = 100 * number
        made.database.execute(
            f"INSERT INTO users SELECT g, 'n' || g FROM generate_series({low}, {low + 20}) g",
            f"INSERT INTO users VALUES (-{number + 1}, repeat('y', 100000))",
            f"DELETE FROM users WHERE id % 9 = {number}",
        )
        Archived(made).log_reach()
    assert made.daemon.term() == 0
    return made


def batches(text: bytes) -> list[tuple[int, int]]:
    """Return where the records of each batch are in a broker's file."""
    found, at = [], 0
    while at < len(text):
        end = at + _LENGTH + 4 + struct.unpack_from(">i", text, at + _LENGTH)[0]
        if not struct.unpack_from(">h", text, at + _ATTRIBUTES)[0] & _IS_CONTROL:
            found.append((at + _RECORDS, end))
        at = end
    return found


def files(made: PipelineUnderTest) -> list[Path]:
    """Return the broker's files with records that a proof covers."""
    client = topics.admin(made.config)
    [node, *_] = client.describe_cluster().result().nodes
    asked = ConfigResource(ResourceType.BROKER, str(node.id))
    folder = Path(str(client.describe_configs([asked])[asked].result()["log.dirs"].value))
    if not folder.is_dir():
        pytest.skip("the broker's files are on another machine")
    prefix = made.config.prefix
    own = (names.frontier_topic, names.messages_topic, names.dead_topic)
    covered = [f"{prefix}.public.users", *(name(prefix) for name in own)]
    found = [path for each in covered for path in sorted(folder.glob(f"{each}-*/*.log"))]
    return [path for path in found if batches(path.read_bytes())]


def crc32c(data: bytes) -> int:
    """Return the checksum that Kafka's batches have."""
    found = 0xFFFFFFFF
    for byte in data:
        found ^= byte
        for _ in range(8):
            found = found >> 1 ^ 0x82F63B78 * (found & 1)
    return found ^ 0xFFFFFFFF


def altered(text: bytes, chance: Random) -> bytes:
    """Return a file with one bit of a record flipped; or with another digit and a right checksum.

    The digit is in a key or a value: the program that wrote it had no other kind of numbers.
    """
    changed, (start, end) = bytearray(text), chance.choice(batches(text))
    digits = [match.start(1) for match in _DIGIT.finditer(text, start, end)]
    if not digits or chance.random() < 0.5:
        changed[chance.randrange(start, end)] ^= 1 << chance.randrange(8)
        return bytes(changed)
    changed[chance.choice(digits)] ^= 1  # 0 becomes 1, 9 becomes 8
    checked = start - _RECORDS + _ATTRIBUTES
    struct.pack_into(">I", changed, checked - 4, crc32c(bytes(changed[checked:end])))
    return bytes(changed)


def test_every_altered_bit_of_a_record_is_named(written: PipelineUnderTest) -> None:
    """Whether or not the broker's checksum was made again, and a client can decode the record."""
    assert proof.prove(written.config).findings == ()
    chance, found = Random(first_seed()), files(written)
    assert {path.parent.name.rpartition(".")[2].partition("-")[0] for path in found} == {
        "users", "frontier", "messages", "dead",
    }  # fmt: skip
    for _ in range(ALTERATIONS):
        path = chance.choice(found)
        topic, text = path.parent.name.rpartition("-")[0], path.read_bytes()
        path.write_bytes(altered(text, chance))
        findings = proof.prove(written.config).findings
        # An altered frontier may show by the records that it states otherwise.
        named = topic if "frontier" not in topic else written.config.prefix
        assert any(named in each for each in findings), (topic, findings)
        path.write_bytes(text)
    assert proof.prove(written.config).findings == ()
